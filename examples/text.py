"""Real text that is on every machine: the source of Python's standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Not library code, or tables of numbers rather than text.
SKIPPED_FOLDERS = frozenset(
    "__pycache__ config dist-packages encodings ensurepip idlelib idle_test lib2to3 "
    "pydoc_data site-packages test tests turtledemo".split()
)
MAX_BYTES = 16 << 20
VALIDATION_SHARE = 0.05


@dataclass(frozen=True)
class Corpus:
    """Bytes as uint8 tensors; no file is in both."""

    train: Tensor
    validation: Tensor
    sha256: str  # of both: two machines with the same digest train on the same text


def load(root: Path | None = None, max_bytes: int = MAX_BYTES) -> Corpus:
    """The *.py files below `root` (default: the standard library), in sorted order."""
    root = root or Path(sysconfig.get_path("stdlib"))
    train, validation = bytearray(), bytearray()
    for name, source in files(root):
        if len(train) + len(validation) + len(source) > max_bytes:
            break
        (validation if is_validation(name) else train).extend(source)
    if not train or not validation:
        raise FileNotFoundError(
            f"text: expected Python source files below {root}, got {len(train)} bytes "
            f"to train on and {len(validation)} to validate on. Point --text at a "
            "folder with more *.py files."
        )
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        validation=torch.frombuffer(validation, dtype=torch.uint8),
        sha256=hashlib.sha256(train + b"|" + validation).hexdigest(),
    )


def files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Relative name and content."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]):
            yield relative.as_posix(), path.read_bytes()


def is_validation(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "little") < VALIDATION_SHARE * 2**32


@dataclass(frozen=True)
class Sampler:
    """Random windows of the text; a function of the seed and the sample's number.

    Samples are numbered through the run: step by step, then microbatch by
    microbatch, then rank by rank.  A step therefore sees the same windows
    whether 2 ranks take 8 each or 4 ranks take 4 each.
    """

    text: Tensor
    seq_len: int
    batch_size: int  # windows per rank and microbatch
    num_microbatches: int
    num_ranks: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.text) <= self.seq_len:
            raise ValueError(
                f"text: expected more than {self.seq_len} bytes for one window, got "
                f"{len(self.text)}. Choose a shorter sequence."
            )

    def batch(self, step: int, microbatch: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [batch_size, seq_len]."""
        share = (step * self.num_microbatches + microbatch) * self.num_ranks + rank
        first = share * self.batch_size
        num_starts = len(self.text) - self.seq_len
        starts = [
            mix(self.seed, sample) % num_starts
            for sample in range(first, first + self.batch_size)
        ]
        return windows(self.text, starts, self.seq_len)


def evenly_spaced(text: Tensor, count: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """`count` windows across the whole text: a fixed set to validate on."""
    num_starts = len(text) - seq_len
    return windows(text, [i * num_starts // count for i in range(count)], seq_len)


def windows(text: Tensor, starts: list[int], seq_len: int) -> tuple[Tensor, Tensor]:
    taken = torch.stack([text[start : start + seq_len + 1] for start in starts]).long()
    return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()


def mix(seed: int, number: int) -> int:
    """64 random-looking bits: splitmix64's output function."""
    mask = 2**64 - 1
    z = (seed * 0xD1342543DE82EF95 + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
