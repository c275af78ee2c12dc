"""DCP's planners, which neither write nor read an object that only unrestricted pickle
could load."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide._sharding.local_parameter import rows_of
from lowtide.saving.errors import CheckpointError


class SavePlanner(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        if write_item.type == WriteItemType.BYTE_IO:
            data.seek(0)
            try:
                torch.load(data, weights_only=True)
            except pickle.UnpicklingError:
                raise CheckpointError(
                    f"lowtide: save: '{write_item.index.fqn}': expected tensors, "
                    "numbers, strings and containers of these, got a "
                    f"{type(object).__name__} that torch.load(weights_only=True) "
                    "refuses. Save what its state_dict() returns, or register the "
                    "class with torch.serialization.add_safe_globals."
                ) from None
            data.seek(0)
        return data


class LoadPlanner(DefaultLoadPlanner):
    """For a flat state dict."""

    def __init__(self, where: Any, new: set[str]) -> None:
        """``new``: names of what takes the class that was saved."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._where, self._new = where, new

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        into = super().resolve_tensor(read_item)
        if read_item.dest_index.fqn in self._new:
            return _Receiver(self, read_item.dest_index.fqn, into)
        return into

    def take(self, name: str, saved: Tensor) -> None:
        """A copy into a plain tensor would undo the quantization of ``saved``."""
        value = self.state_dict[name]
        if rows_of(value).size() != saved.size():
            raise CheckpointError(
                f"lowtide: load: {self._where(name)}: expected this rank's part, "
                f"{list(rows_of(value).shape)}, got a {type(saved).__name__} of "
                f"{list(saved.shape)}, which can not be joined with others. Load it on "
                "the ranks that saved it, or on more."
            )
        if isinstance(value, DTensor):
            saved = DTensor(saved, value._spec, requires_grad=False)
        self.state_dict[name] = saved

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            first = str(error).splitlines()[0]
            raise CheckpointError(
                f"lowtide: load: {self._where(name)}: expected tensors, numbers, "
                f"strings and containers of these, got what torch.load(weights_only="
                f"True) refuses: {first}. Register the class with "
                "torch.serialization.add_safe_globals if you trust the checkpoint."
            ) from None


class _Receiver:
    """What DCP's reader copies a saved tensor into, by these methods alone."""

    def __init__(self, planner: LoadPlanner, name: str, into: Tensor) -> None:
        self._planner, self._name, self._into = planner, name, into

    def detach(self) -> "_Receiver":
        return self

    def size(self) -> torch.Size:
        return self._into.size()

    def copy_(self, saved: Tensor) -> None:
        if is_traceable_wrapper_subclass(saved):
            self._planner.take(self._name, saved)
        else:
            self._into.detach().copy_(saved)
