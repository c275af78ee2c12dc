"""DCP's `.metadata`: a pickle, of which only the classes that DCP puts there are let
in. Whatever else it names is refused before it runs."""

import io
import pickle
import pickletools
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from lowtide.saving.errors import CheckpointError
from lowtide.saving.manifest import METADATA

_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.metadata",
    "torch.distributed._shard.sharding_spec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec",
)
_NAMES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.remote_device", "_remote_device"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath")),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # One name and no more: "Metadata.__init__.__globals__" would lead anywhere.
        plain = "." not in name and not name.startswith("__")
        if (module, name) in _NAMES or (module in _MODULES and plain):
            found = super().find_class(module, name)
            if (module, name) in _NAMES or isinstance(found, type):
                return found
        if module == "torch" and isinstance(
            value := getattr(torch, name, None),
            torch.dtype | torch.layout | torch.memory_format,
        ):
            return value
        raise pickle.UnpicklingError(f"{module}.{name}")


def _require_own_numbers(data: bytes) -> None:
    """The unpickler has a place for every number up to the largest that an object is
    given: five bytes would take gigabytes."""
    for operation, number, _ in pickletools.genops(data):
        if operation.name.endswith("PUT") and not 0 <= int(number or 0) <= len(data):
            raise pickle.UnpicklingError(f"object {number} of {len(data)} bytes")


def parse(data: bytes, path: str) -> Metadata:
    """``path``: for errors. Raises CheckpointError."""
    try:
        _require_own_numbers(data)
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # whatever the bytes make of it
        raise _refused(path, f"{type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata) or not isinstance(
        metadata.storage_data, dict
    ):
        raise _refused(path, type(metadata).__name__)
    return metadata


def _refused(path: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"lowtide: load: {path}/{METADATA}: expected the metadata of a distributed "
        f"checkpoint, nothing else in it, got {got}. The file is damaged or no "
        "checkpoint's: load another one."
    )
