"""The code of docs/losses.md runs as printed, and its arithmetic is right."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import _C
from lowtide.losses import _sizes, linear_cross_entropy

PAGE = (Path(__file__).parents[3] / "docs" / "losses.md").read_text()
MIB = 1 << 20


def test_code_runs_verbatim() -> None:
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, names)
    hidden, head = names["hidden"], names["head"]
    assert isinstance(hidden, torch.Tensor) and hidden.grad is not None
    assert isinstance(head, torch.nn.Linear) and head.weight.grad is not None
    loss_head = names["LossHead"](64, 1000)  # type: ignore[operator]
    assert loss_head(hidden, names["targets"]).isfinite()


def cells(start: str) -> list[str]:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def arithmetic(tokens: int, features: int, vocab: int, dtype: torch.dtype) -> list[str]:
    """As the table prints it, by the page's formulas and the default sizes."""
    size = dtype.itemsize

    def tile(t: int, rows: int) -> float:
        block = min(t, 16 * MIB // (4 * rows))
        return size * t * rows + (4 * block * rows if size < 4 else 0)

    v = _sizes.vocab_chunk_or_default(None, vocab, features, dtype)
    t = _sizes.token_chunk_or_default(None, tokens, v, dtype)
    narrow = size < 4
    dx = 4 * tokens * features
    loop = dx + tile(t, v) + 4 * v * features * narrow
    backward = max(loop, dx + size * tokens * features * narrow)
    whole = _sizes.WHOLE_VOCABULARY_TILE_BYTES
    t = _sizes.token_chunk_or_default(None, tokens, vocab, dtype, whole)
    dw, dh = size * vocab * features, size * tokens * features
    return [
        mib(4 * tokens * vocab),
        f"{mib(backward)} + {mib(dw)}",
        f"{mib(tile(t, vocab))} + {mib(dw + dh)}",
    ]


def mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.1f}".removesuffix(".0")


def test_table_of_bytes() -> None:
    shapes = {
        "T 8192,": (8192, 4096, 128_256, torch.bfloat16),
        "T 32768,": (32768, 4096, 128_256, torch.bfloat16),
        "T 2048,": (2048, 512, 32_000, torch.float32),
    }
    for start, shape in shapes.items():
        assert cells(start)[1:4] == arithmetic(*shape), start


def test_measured_peaks() -> None:
    def peak(loss_of: Callable[..., Tensor]) -> str:
        hidden = torch.zeros(2048, 512, requires_grad=True)
        weight = torch.zeros(32_000, 512, requires_grad=True)
        targets = torch.zeros(2048, dtype=torch.int64)
        with _C.AllocationTimeline(torch.device("cpu"), capacity=1 << 16) as timeline:
            loss_of(hidden, weight, targets).backward()
        return mib(max(timeline.samples()["total"]))

    plain = peak(lambda h, w, targets: F.cross_entropy(F.linear(h, w), targets))
    by_rows = peak(linear_cross_entropy)
    by_tokens = peak(partial(linear_cross_entropy, chunking="tokens"))
    start = "the same, whole peak; plain loss"
    assert cells(start) == [f"{start} {plain}", "", by_rows, by_tokens, "measured"]


def test_chunks_that_keep_an_h100_busy() -> None:
    operations_per_byte = 989e12 / 3.35e12
    assert f"v = {8 / 2 * operations_per_byte:.0f} rows" in " ".join(PAGE.split())
    assert f"t = {8 / 6 * operations_per_byte:.0f} tokens" in " ".join(PAGE.split())
