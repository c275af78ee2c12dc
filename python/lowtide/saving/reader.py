"""How tensors are read: DCP's reader, which checks each part's bytes as it reads them,
so nothing that has changed since the checkpoint was verified is used, and which makes
no other objects than the model has."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from lowtide._sharding.local_parameter import rows_of
from lowtide.saving import checksums
from lowtide.saving.content import Live
from lowtide.saving.verification import Opened, damaged_item


class Reader(FileSystemReader):
    def __init__(self, opened: Opened) -> None:
        super().__init__(opened.folder)
        self._opened = opened
        self._items = {
            (name, item.begin): item
            for name, file in (opened.manifest.files if opened.manifest else {}).items()
            for item in file.items
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._opened.metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        data = super()._slice_file(file, sinfo).read(-1)
        item = self._items.get((sinfo.relative_path, sinfo.offset))
        if item is not None:
            assert self._opened.manifest is not None
            found = checksums.of(self._opened.manifest.algorithm, data)
            if found != item.checksum:
                raise damaged_item(self._opened.folder, sinfo.relative_path, item)
        return io.BytesIO(data)


@contextlib.contextmanager
def classes_of(live: Live) -> Iterator[None]:
    """Lets be read what tensors as the model's and the optimizers' own are pickled as:
    of subclasses, torch's reader knows few."""
    smallest: dict[type, Tensor] = {}
    states = [state for one in live.optimizers for state in one.state.values()]
    for value in (*live.state.values(), *(v for s in states for v in s.values())):
        if isinstance(value, Tensor):
            tensor = rows_of(value)
            known = smallest.setdefault(type(tensor), tensor)
            if tensor.numel() < known.numel():
                smallest[type(tensor)] = tensor
    names: set[str] = set()
    for kind, tensor in smallest.items():
        if kind is not Tensor:
            file = io.BytesIO()
            torch.save(tensor.detach().cpu(), file)
            file.seek(0)
            names.update(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    with torch.serialization.safe_globals([_named(name) for name in sorted(names)]):
        yield


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules[module], attribute)
