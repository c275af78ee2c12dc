"""Whether a checkpoint is what was saved, before anything of it is used.

Ranks divide the files among them: together they read every byte once. The metadata and
the manifest are read by all.
"""

import dataclasses
import os
import warnings
from collections import Counter
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from lowtide.saving import checksums, manifest, metadata
from lowtide.saving.errors import CheckpointError

_AT_ONCE = 1 << 24  # bytes
_MOST_EMPTY = 1024  # places of lists that have nothing in them


@dataclasses.dataclass(frozen=True)
class Opened:
    folder: Path
    metadata: Metadata
    manifest: manifest.Manifest | None  # of one that something vouches for

    def where(self, name: str) -> str:
        """For errors: a tensor, and the files it is in."""
        files = sorted(
            {
                info.relative_path
                for index, info in self.metadata.storage_data.items()
                if index.fqn == name
            }
        )
        return f"{self.folder}/{', '.join(files)}: '{name}'"


def open_checkpoint(folder: Path) -> Opened:
    """Reads what all ranks need to know; the tensors' files are not opened. Raises
    CheckpointError for a manifest or metadata that is damaged, for files that are
    missing, foreign, or too short or long, and without the package of the checksums."""
    data = _read(folder, manifest.METADATA)
    vouched = None
    if (folder / manifest.FILE_NAME).exists():
        path = folder / manifest.FILE_NAME
        vouched = manifest.parse(_read(folder, manifest.FILE_NAME), str(path))
        _require_files(folder, vouched)
        known = vouched.files[manifest.METADATA]
        if checksums.of(vouched.algorithm, data) != known.checksum:
            raise _damaged(folder, manifest.METADATA, "its bytes", "others")
    else:
        warnings.warn(
            f"lowtide: load: {folder}: expected a manifest ({manifest.FILE_NAME}), got "
            "a checkpoint without, as torch.distributed.checkpoint.save leaves it: "
            "nothing vouches for its bytes. Save it again with lowtide.save.",
            stacklevel=2,
        )
    opened = Opened(folder, metadata.parse(data, str(folder)), vouched)
    _require_places(opened)
    _require_paths(opened)
    return opened


def verify(opened: Opened, rank: int, size: int) -> None:
    """Every ``size``-th file, from ``rank`` on, against its checksum. Raises
    CheckpointError naming the file and the tensor."""
    if opened.manifest is None:
        return
    algorithm = opened.manifest.algorithm
    names = sorted(set(opened.manifest.files) - {manifest.METADATA})
    for name in names[rank::size]:
        file, path = opened.manifest.files[name], opened.folder / name
        if _checksum(algorithm, path, 0, file.length) == file.checksum:
            continue
        for item in file.items:
            found = _checksum(algorithm, path, item.begin, item.length)
            if found != item.checksum:
                raise damaged_item(opened.folder, name, item)
        raise _damaged(opened.folder, name, "its bytes", "others")


def damaged_item(folder: Path, name: str, item: manifest.Item) -> CheckpointError:
    where = f"bytes {item.begin} to {item.begin + item.length} as they were saved"
    return _damaged(folder, f"{name}: '{item.name}'", where, "others")


def _checksum(algorithm: str, path: Path, begin: int, length: int) -> str:
    checksum = checksums.new(algorithm)
    with path.open("rb") as file:
        file.seek(begin)
        while length > 0 and (data := file.read(min(length, _AT_ONCE))):
            checksum.update(data)
            length -= len(data)
    return checksum.hexdigest()


def _require_files(folder: Path, vouched: manifest.Manifest) -> None:
    there = {entry.name: entry for entry in os.scandir(folder)}
    for name, file in sorted(vouched.files.items()):
        entry = there.pop(name, None)
        if entry is None or not entry.is_file():
            inside = {item.name: None for item in file.items}
            raise _damaged(folder, name, f"a file{_named(list(inside))}", "none")
        length = entry.stat().st_size
        if length != file.length:
            cut = file.item_at(length)
            at = f"{name}: '{cut.name}'" if cut is not None else name
            raise _damaged(folder, at, f"a file of {file.length} bytes", str(length))
    there.pop(manifest.FILE_NAME, None)
    if there:
        foreign = sorted(there)[0]
        raise _damaged(
            folder, foreign, "only files that the manifest names", "a foreign one"
        )


def _named(names: list[str]) -> str:
    if not names:
        return ""
    others = f" and {len(names) - 1} others" if len(names) > 1 else ""
    return f" with '{names[0]}'{others}"


def _require_places(opened: Opened) -> None:
    """What the metadata names is what is vouched for; each part in one place."""
    if opened.manifest is None:
        for index, info in opened.metadata.storage_data.items():
            if os.path.basename(info.relative_path) != info.relative_path:
                raise _damaged(
                    opened.folder,
                    manifest.METADATA,
                    f"'{index.fqn}' in a file of the folder",
                    repr(info.relative_path),
                )
        return
    vouched = {
        (item.name, name, item.begin, item.length)
        for name, file in opened.manifest.files.items()
        for item in file.items
    }
    for index, info in opened.metadata.storage_data.items():
        place = (index.fqn, info.relative_path, info.offset, info.length)
        if place not in vouched:
            raise _damaged(
                opened.folder,
                f"{info.relative_path}: '{index.fqn}'",
                "a place that the manifest names",
                f"byte {info.offset}",
            )


def _require_paths(opened: Opened) -> None:
    """Where values are put together again: DCP fills lists up to the number it is
    given, which a name or two do not need to be large."""
    most = len(opened.metadata.state_dict_metadata) + _MOST_EMPTY
    paths = opened.metadata.planner_data or {}
    for name, path in paths.items():
        if not isinstance(path, tuple) or not all(
            isinstance(key, str) or (type(key) is int and 0 <= key <= most)
            for key in path
        ):
            raise _damaged(
                opened.folder,
                f"{manifest.METADATA}: '{name}'",
                f"a path of names and of numbers up to {most}",
                repr(path),
            )
    above = {path[:n] for path in paths.values() for n in range(len(path))}
    above.update(path for path, count in Counter(paths.values()).items() if count > 1)
    for name, path in paths.items():
        if path in above:
            raise _damaged(
                opened.folder,
                f"{manifest.METADATA}: '{name}'",
                "a place of its own",
                f"{path}, where there are others",
            )


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise _damaged(folder, name, "a file", str(error.strerror)) from None


def _damaged(folder: Path, what: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"lowtide: load: {folder}/{what}: expected {expected}, got {got}. The "
        "checkpoint is damaged: load an older one."
    )
