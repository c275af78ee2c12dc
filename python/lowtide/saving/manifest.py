"""What is vouched for: every file of a checkpoint, every tensor's place in it, and
their checksums, in one JSON file beside them.

The checksum is CRC-32, zlib's: Python's own, so there is nothing to install; it runs
without the GIL, at about 1 GB/s a core, and ranks divide the files among them. It finds
accidents; against somebody who wants to deceive it is nothing.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any

from lowtide.saving.errors import CheckpointError

FILE_NAME = "lowtide.json"
METADATA = ".metadata"  # torch's: what DCP knows of the tensors

_FORMAT = "lowtide checkpoint"
_VERSION = 1
_LARGEST = 2**63


@dataclasses.dataclass(frozen=True)
class Item:
    """A part of a tensor, or an object: bytes [begin, begin + length) of its file."""

    name: str
    begin: int
    length: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class File:
    """Items follow each other from the first byte to the last; a file that has none
    is known as a whole."""

    length: int
    crc32: int
    items: tuple[Item, ...] = ()

    def item_at(self, byte: int) -> Item | None:
        inside = (i for i in self.items if i.begin <= byte < i.begin + i.length)
        return next(inside, None)


@dataclasses.dataclass(frozen=True)
class Manifest:
    order: int  # of those beside it: the highest is the newest
    world_size: int  # of the ranks that saved
    files: Mapping[str, File]


def to_bytes(manifest: Manifest) -> bytes:
    """One line of JSON with its own checksum."""
    body = {
        "format": _FORMAT,
        "version": _VERSION,
        "checksum": "crc32",
        "order": manifest.order,
        "world_size": manifest.world_size,
        "files": {
            name: {
                "length": file.length,
                "crc32": file.crc32,
                "items": [[i.name, i.begin, i.length, i.crc32] for i in file.items],
            }
            for name, file in sorted(manifest.files.items())
        },
    }
    return _dump({**body, "crc32": zlib.crc32(_dump(body))})


def parse(data: bytes, path: str) -> Manifest:
    """``path``: for errors. Raises CheckpointError for anything but what
    :func:`to_bytes` writes."""
    try:
        content = json.loads(data, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise _refused(path, "JSON", f"{type(error).__name__}: {error}") from None
    if not isinstance(content, dict):
        raise _refused(path, "an object", type(content).__name__)
    if content.get("format") != _FORMAT or content.get("version") != _VERSION:
        found = (content.get("format"), content.get("version"))
        raise _refused(path, f"'{_FORMAT}', version {_VERSION}", repr(found))
    body = {key: value for key, value in content.items() if key != "crc32"}
    if zlib.crc32(_dump(body)) != content.get("crc32"):
        raise _refused(path, "the bytes that were written", "others")
    if content.get("checksum") != "crc32":
        raise _refused(path, "checksum crc32", repr(content.get("checksum")))
    files = content.get("files")
    if not isinstance(files, dict) or METADATA not in files:
        raise _refused(path, f"files, {METADATA} among them", _short(files))
    return Manifest(
        order=_number(content.get("order"), path, "order"),
        world_size=_number(content.get("world_size"), path, "world_size"),
        files={name: _file(name, file, path) for name, file in files.items()},
    )


def _file(name: str, content: Any, path: str) -> File:
    if name in ("", ".", "..", FILE_NAME) or "/" in name or "\0" in name:
        raise _refused(path, "names of files in its own folder", repr(name))
    if not isinstance(content, dict) or not isinstance(content.get("items"), list):
        raise _refused(path, f"length, crc32 and items of {name}", _short(content))
    length = _number(content.get("length"), path, f"length of {name}")
    items = tuple(_item(name, item, path) for item in content["items"])
    end = 0
    for item in items:
        if item.begin != end:
            expected = f"'{item.name}' in {name} to begin at byte {end}"
            raise _refused(path, expected, str(item.begin))
        end += item.length
    if items and end != length:
        raise _refused(path, f"items of {name} to end at byte {length}", str(end))
    return File(length, _number(content.get("crc32"), path, f"crc32 of {name}"), items)


def _item(file: str, content: Any, path: str) -> Item:
    if (
        not isinstance(content, list)
        or len(content) != 4
        or not isinstance(content[0], str)
    ):
        raise _refused(path, f"[name, begin, length, crc32] in {file}", _short(content))
    name = content[0]
    numbers = [_number(number, path, f"a number of '{name}'") for number in content[1:]]
    return Item(name, *numbers)


def _number(value: Any, path: str, what: str) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise _refused(path, f"{what} to be a number", _short(value))
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key that comes twice")
    return content


def _dump(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refused(path: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"lowtide: load: {path}: expected {expected}, got {got}. The checkpoint is "
        "damaged: load an older one."
    )
