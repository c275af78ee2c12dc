"""DCP's planners, which neither write nor read an object that only unrestricted pickle
could load."""

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

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

    def __init__(self, where: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._where = where

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
