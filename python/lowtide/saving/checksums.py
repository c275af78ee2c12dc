"""Checksums of a checkpoint's bytes: XXH3 of 64 bits, of the package xxhash.

CRC-32, Python's own, is what earlier checkpoints have, and those of ranks without the
package. Both find accidents; against somebody who wants to deceive they are nothing.
Neither holds the GIL over large parts.
"""

import sys
import zlib
from collections.abc import Iterable
from typing import Any, Protocol

from lowtide.saving.errors import CheckpointError

CRC32, XXH3 = "crc32", "xxh3_64"
DIGITS = {CRC32: 8, XXH3: 16}  # in hexadecimal


class Checksum(Protocol):
    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Crc32:
    _value = 0

    def update(self, data: Any, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:0{DIGITS[CRC32]}x}"


def new(algorithm: str) -> Checksum:
    """Raises CheckpointError where its package is not there."""
    if algorithm == CRC32:
        return _Crc32()
    assert algorithm == XXH3, algorithm
    try:
        import xxhash
    except ImportError:
        raise CheckpointError(
            f"lowtide: load: expected the package xxhash, whose {XXH3} vouches for "
            f"what was saved, got none. Run `{sys.executable} -m pip install xxhash`."
        ) from None
    return xxhash.xxh3_64()


def of(algorithm: str, data: bytes) -> str:
    checksum = new(algorithm)
    checksum.update(data)
    return checksum.hexdigest()


def best() -> str:
    """That this process can write."""
    try:
        new(XXH3)
    except CheckpointError:
        return CRC32
    return XXH3


def common(best_of_ranks: Iterable[str]) -> str:
    return XXH3 if set(best_of_ranks) == {XXH3} else CRC32
