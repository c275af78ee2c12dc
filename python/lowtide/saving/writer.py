"""How a checkpoint is written: DCP's files, and the manifest that vouches for them.

`torch.distributed.checkpoint.save` plans, and brings results and errors of all ranks
together. What a rank wrote is on storage before it answers, and rank 0 publishes when
all have, in `finish`: the rename is the last thing that can fail.
"""

import dataclasses
import io
import os
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lowtide.saving import checksums, folders, manifest


class Writer(FileSystemWriter):
    """Writes one file a rank. ``aside``: rank 0's, of the same folder; ``algorithm``:
    of checksums, the same on all ranks."""

    def __init__(
        self,
        folder: Path,
        aside: folders.Aside | None,
        world_size: int,
        algorithm: str,
    ):
        super().__init__(folder)
        self._folder = folder
        self._aside = aside
        self._world_size = world_size
        self._algorithm = algorithm

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> "Future[list[WriteResult]]":
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(plan, planner) if plan.items else [])
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results: list[_Written] = []
        with (self._folder / name).open("xb") as file:
            stream = _Checked(file, self._algorithm)
            for item in plan.items:
                begin = stream.begin_item()
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    torch.save(_alone_on_the_host(data), cast(IO[bytes], stream))
                else:
                    stream.write(data.getbuffer())
                length = stream.length - begin
                results.append(
                    _Written(
                        index=item.index,
                        size_in_bytes=length,
                        storage_data=_StorageInfo(name, begin, length),
                        checksum=stream.of_item.hexdigest(),
                    )
                )
            file.flush()
            os.fsync(file.fileno())
        folders.synchronize(self._folder)
        of_file = stream.of_file.hexdigest()
        return [
            dataclasses.replace(result, file_checksum=of_file) for result in results
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0."""
        assert self._aside is not None
        # Results go into the metadata, which is no place for what the manifest says.
        plain = [
            [WriteResult(r.index, r.size_in_bytes, r.storage_data) for r in of_rank]
            for of_rank in results
        ]
        super().finish(metadata, plain)
        data = (self._folder / manifest.METADATA).read_bytes()
        checksum = checksums.of(self._algorithm, data)
        files = {manifest.METADATA: manifest.File(len(data), checksum)}
        for of_rank in results:
            files |= _files_of(of_rank)
        vouched = manifest.Manifest(
            self._aside.order, self._world_size, files, self._algorithm
        )
        with (self._folder / manifest.FILE_NAME).open("xb") as file:
            file.write(manifest.to_bytes(vouched))
            file.flush()
            os.fsync(file.fileno())
        folders.publish(self._aside)


@dataclasses.dataclass(frozen=True)
class _Written(WriteResult):
    checksum: str
    file_checksum: str = ""  # of all of its file, once that is written


class _Checked(io.RawIOBase):
    """Counts what is written through it, and its checksums."""

    def __init__(self, file: Any, algorithm: str) -> None:
        self._file = file
        self._algorithm = algorithm
        self.length = 0
        self.of_file = checksums.new(algorithm)
        self.of_item = checksums.new(algorithm)

    def begin_item(self) -> int:
        self.of_item = checksums.new(self._algorithm)
        return self.length

    def write(self, data: Any) -> int:
        self._file.write(data)
        size = memoryview(data).nbytes
        self.length += size
        self.of_file.update(data)
        self.of_item.update(data)
        return size


def _alone_on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    """Without the rest of the storage it is a view of."""
    host = tensor.detach().cpu()
    whole = host.untyped_storage().nbytes() == host.numel() * host.element_size()
    return host if whole else host.clone()


def _files_of(results: list[WriteResult]) -> dict[str, manifest.File]:
    """One, or none of a rank that wrote nothing."""
    written = [result for result in results if isinstance(result, _Written)]
    items = tuple(
        manifest.Item(
            result.index.fqn,
            result.storage_data.offset,
            result.size_in_bytes,
            result.checksum,
        )
        for result in written
    )
    if not items:
        return {}
    length = sum(item.length for item in items)
    last = written[-1]
    return {
        last.storage_data.relative_path: manifest.File(
            length, last.file_checksum, items
        )
    }
