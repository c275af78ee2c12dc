"""How tensors are read: DCP's reader, which checks each part's bytes as it reads them,
so nothing that has changed since the checkpoint was verified is used."""

import io
import zlib
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

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
        if item is not None and zlib.crc32(data) != item.crc32:
            raise damaged_item(self._opened.folder, sinfo.relative_path, item)
        return io.BytesIO(data)
