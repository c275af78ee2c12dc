"""What is vouched for: every file of a checkpoint, every tensor's place in it, and
their checksums, in one JSON file beside them.

Version 1 had CRC-32 as numbers. The manifest's own checksum stays that, so it is known
whole wherever it is read, and says then which of checksums.py the others are.
"""

import dataclasses
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from lowtide.saving import checksums
from lowtide.saving.errors import CheckpointError

FILE_NAME = "lowtide.json"
METADATA = ".metadata"  # torch's: what DCP knows of the tensors

_FORMAT = "lowtide checkpoint"
_VERSION = 2
_LARGEST = 2**63


@dataclasses.dataclass(frozen=True)
class Item:
    """A part of a tensor, or an object: bytes [begin, begin + length) of its file."""

    name: str
    begin: int
    length: int
    checksum: str


@dataclasses.dataclass(frozen=True)
class File:
    """Items follow each other from the first byte to the last; a file that has none
    is known as a whole."""

    length: int
    checksum: str
    items: tuple[Item, ...] = ()

    def item_at(self, byte: int) -> Item | None:
        inside = (i for i in self.items if i.begin <= byte < i.begin + i.length)
        return next(inside, None)


@dataclasses.dataclass(frozen=True)
class Manifest:
    order: int  # of those beside it: the highest is the newest
    world_size: int  # of the ranks that saved
    files: Mapping[str, File]
    algorithm: str = checksums.XXH3


def to_bytes(manifest: Manifest) -> bytes:
    """One line of JSON with its own checksum."""
    body = {
        "format": _FORMAT,
        "version": _VERSION,
        "checksum": manifest.algorithm,
        "order": manifest.order,
        "world_size": manifest.world_size,
        "files": {
            name: {
                "length": file.length,
                "checksum": file.checksum,
                "items": [[i.name, i.begin, i.length, i.checksum] for i in file.items],
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
    version = content.get("version")
    if content.get("format") != _FORMAT or type(version) is not int or version < 1:
        found = (content.get("format"), version)
        raise _refused(path, f"'{_FORMAT}', version {_VERSION} or less", repr(found))
    body = {key: value for key, value in content.items() if key != "crc32"}
    if zlib.crc32(_dump(body)) != content.get("crc32"):
        raise _refused(path, "the bytes that were written", "others")
    algorithm = content.get("checksum")
    if version > _VERSION or algorithm not in (*checksums.DIGITS,):
        known = f"checksums {' or '.join(checksums.DIGITS)}"
        raise CheckpointError(
            f"lowtide: load: {path}: expected version {_VERSION} or less and {known}, "
            f"got version {version} and {_short(algorithm)}. Load it with the lowtide "
            "that saved it."
        )
    files = content.get("files")
    if not isinstance(files, dict) or METADATA not in files:
        raise _refused(path, f"files, {METADATA} among them", _short(files))
    read = _Reading(path, algorithm, in_numbers=version == 1)
    return Manifest(
        order=_number(content.get("order"), path, "order"),
        world_size=_number(content.get("world_size"), path, "world_size"),
        files={name: read.file(name, file) for name, file in files.items()},
        algorithm=algorithm,
    )


@dataclasses.dataclass(frozen=True)
class _Reading:
    """``path``: for errors. ``in_numbers``: checksums are, as in version 1."""

    path: str
    algorithm: str
    in_numbers: bool

    def file(self, name: str, content: Any) -> File:
        path = self.path
        if name in ("", ".", "..", FILE_NAME) or "/" in name or "\0" in name:
            raise _refused(path, "names of files in its own folder", repr(name))
        if not isinstance(content, dict) or not isinstance(content.get("items"), list):
            raise _refused(
                path, f"length, checksum and items of {name}", _short(content)
            )
        length = _number(content.get("length"), path, f"length of {name}")
        items = tuple(self._item(name, item) for item in content["items"])
        end = 0
        for item in items:
            if item.begin != end:
                expected = f"'{item.name}' in {name} to begin at byte {end}"
                raise _refused(path, expected, str(item.begin))
            end += item.length
        if items and end != length:
            raise _refused(path, f"items of {name} to end at byte {length}", str(end))
        checksum = content.get("crc32" if self.in_numbers else "checksum")
        return File(length, self._checksum(checksum, name), items)

    def _item(self, file: str, content: Any) -> Item:
        if (
            not isinstance(content, list)
            or len(content) != 4
            or not isinstance(content[0], str)
        ):
            expected = f"[name, begin, length, checksum] in {file}"
            raise _refused(self.path, expected, _short(content))
        name, *numbers, checksum = content
        what = f"a number of '{name}'"
        begin, length = (_number(number, self.path, what) for number in numbers)
        return Item(name, begin, length, self._checksum(checksum, f"'{name}'"))

    def _checksum(self, value: Any, of: str) -> str:
        digits = checksums.DIGITS[self.algorithm]
        if self.in_numbers:
            value = f"{_number(value, self.path, f'crc32 of {of}'):0{digits}x}"
        if not isinstance(value, str) or not re.fullmatch(
            f"[0-9a-f]{{{digits}}}", value
        ):
            expected = f"{self.algorithm} of {of} in {digits} hexadecimal digits"
            raise _refused(self.path, expected, _short(value))
        return value


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
