"""What the loss allocates, byte for byte, and what it never allocates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lowtide import _C
from lowtide.losses import _sizes, _tiles, linear_cross_entropy

CPU = torch.device("cpu")
MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


@pytest.fixture(autouse=True)
def bare_kernels() -> Iterator[None]:
    """oneDNN brings scratch of its own, as large as a product's result."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.backends.mkldnn.flags(enabled=False):
        yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Shape:
    tokens: int = 512
    features: int = 32
    vocab_size: int = 4096
    token_chunk: int = 128
    vocab_chunk: int = 256
    dtype: torch.dtype = torch.bfloat16
    chunking: str = "vocabulary"
    frozen_head: bool = False
    everything: bool = False  # bias, label smoothing and z-loss
    reduction: str = "mean"

    @property
    def weight_bytes(self) -> int:
        return self.dtype.itemsize * self.vocab_size * self.features

    def tile(self, rows: int) -> int:
        """As the docstring of linear_cross_entropy has it."""
        tokens, size = self.token_chunk, self.dtype.itemsize
        block = min(tokens, 16 * MIB // (4 * rows))
        scratch = max(4 * block * rows, 8 * self.features) if size < 4 else 0
        return size * tokens * rows + scratch

    def forward(self) -> int:
        if self.chunking == "vocabulary":
            return self.tile(self.vocab_chunk)
        gradients = self.dtype.itemsize * self.tokens * self.features
        gradients += 0 if self.frozen_head else self.weight_bytes
        return gradients + self.tile(self.vocab_size)

    def backward(self) -> int:
        assert self.chunking == "vocabulary"
        narrow = self.dtype.itemsize < 4
        dx = 4 * self.tokens * self.features
        rows = 4 * self.vocab_chunk * self.features
        rows *= narrow and not self.frozen_head
        cast = self.dtype.itemsize * self.tokens * self.features * narrow
        loop = dx + self.tile(self.vocab_chunk) + rows
        return max(loop, dx + cast) + (0 if self.frozen_head else self.weight_bytes)

    def vectors(self) -> int:
        bias = 16 * self.vocab_size if self.everything else 0
        return 16 * self.tokens + 40 * self.token_chunk + bias + 16


@dataclass(frozen=True)
class Seen:
    forward: int  # peaks above what was live before
    kept: int  # between forward and backward
    backward: int
    largest: int  # single allocation of both


def observe(shape: Shape) -> Seen:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.features, generator=g)
    weight = torch.randn(shape.vocab_size, shape.features, generator=g)
    hidden = hidden.to(shape.dtype).requires_grad_()
    weight = weight.to(shape.dtype).requires_grad_(not shape.frozen_head)
    targets = torch.randint(shape.vocab_size, (shape.tokens,), generator=g)
    settings: dict[str, object] = {"reduction": shape.reduction}
    incoming = torch.ones(shape.tokens if shape.reduction == "none" else ())
    if shape.chunking == "vocabulary":
        settings["vocab_chunk"] = shape.vocab_chunk
    if shape.everything:
        settings |= {"label_smoothing": 0.1, "z_loss": 1e-3}
        settings["bias"] = weight.detach()[:, 0].clone().requires_grad_()

    def forward() -> Tensor:
        return linear_cross_entropy(
            hidden,
            weight,
            targets,
            chunking=shape.chunking,
            token_chunk=shape.token_chunk,
            **settings,
        )

    forward().backward(incoming)  # whatever is made once is made
    hidden.grad = weight.grad = None
    losses: list[Tensor] = []
    first = totals(lambda: losses.append(forward()))
    second = totals(lambda: losses[0].backward(incoming))
    steps = itertools.chain(itertools.pairwise(first), itertools.pairwise(second))
    largest = max(after - before for before, after in steps)
    return Seen(max(first), first[-1], max(second), largest)


def totals(fn: Callable[[], object]) -> list[int]:
    with _C.AllocationTimeline(CPU, capacity=1 << 16) as timeline:
        fn()
    return timeline.samples()["total"]


SHAPES = [
    replace(shape, dtype=dtype, frozen_head=frozen)
    for shape in (
        Shape(),
        Shape(tokens=2048, features=64, vocab_size=1024),
        Shape(tokens=300, token_chunk=300, vocab_chunk=1024),
        Shape(features=512, vocab_size=640, token_chunk=64, vocab_chunk=64),
    )
    for dtype in (torch.float32, torch.bfloat16)
    for frozen in (False, True)
]


def name(shape: Shape) -> str:
    head = "frozen" if shape.frozen_head else "trained"
    return f"{shape.tokens}x{shape.features}x{shape.vocab_size}-{shape.dtype}-{head}"


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_peak_by_vocabulary_is_the_formula(shape):
    seen = observe(shape)
    assert 0 <= seen.forward - shape.forward() <= shape.vectors()
    assert 0 <= seen.backward - shape.backward() <= shape.vectors()
    assert seen.kept == 4 + 8 * shape.tokens  # the loss; two vectors for backward


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_peak_by_tokens_is_the_formula(shape):
    shape = replace(shape, chunking="tokens")
    seen = observe(shape)
    assert 0 <= seen.forward - shape.forward() <= shape.vectors()
    kept = shape.forward() - shape.tile(shape.vocab_size)
    assert seen.kept == 4 + kept
    scratch = 0 if shape.dtype.itemsize == 4 else 2 * kept
    assert seen.backward <= 4 + min(scratch, 16 * MIB), "gradients are handed over"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunking", ["vocabulary", "tokens"])
def test_bias_smoothing_and_z_loss_add_vectors_only(dtype, chunking):
    shape = Shape(dtype=dtype, everything=True, chunking=chunking)
    seen = observe(shape)
    assert 0 <= seen.forward - shape.forward() <= shape.vectors()
    if chunking == "vocabulary":
        assert 0 <= seen.backward - shape.backward() <= shape.vectors()


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_losses_of_each_token_have_the_same_peaks(shape):
    shape = replace(shape, reduction="none")
    seen = observe(shape)
    assert 0 <= seen.forward - shape.forward() <= shape.vectors()
    assert 0 <= seen.backward - shape.backward() <= shape.vectors()
    assert seen.kept == 4 * shape.tokens + 8 * shape.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_logits_and_no_wide_weight_are_ever_allocated(dtype):
    shape = Shape(features=64, dtype=dtype)
    logits = dtype.itemsize * shape.tokens * shape.vocab_size
    seen = observe(shape)
    assert seen.largest == shape.weight_bytes  # its gradient, in its own dtype
    assert observe(replace(shape, frozen_head=True)).largest == 4 * 512 * 64
    seen = observe(replace(shape, chunking="tokens"))
    assert shape.weight_bytes <= seen.largest < logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_vocabulary_the_peak_does_not_grow_with_the_vocabulary(dtype):
    shape = Shape(dtype=dtype, frozen_head=True)
    one = observe(shape)
    more = observe(replace(shape, vocab_size=2 * shape.vocab_size))
    assert (one.forward, one.backward) == (more.forward, more.backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_tokens_the_peak_does_not_grow_with_tokens_times_vocabulary(dtype):
    """Twice the tokens: a longer gradient of hidden and longer vectors, at either
    size of the vocabulary."""

    def growth(vocab_size: int) -> int:
        shape = Shape(dtype=dtype, chunking="tokens", vocab_size=vocab_size)
        longer = replace(shape, tokens=2 * shape.tokens)
        return observe(longer).forward - observe(shape).forward

    assert growth(1024) == growth(4096)
    assert growth(4096) <= (32 * dtype.itemsize + 16) * 512


def test_the_scratch_is_bounded(monkeypatch):
    shape = Shape(token_chunk=512, vocab_chunk=4096)
    wide = observe(shape)
    monkeypatch.setattr(_tiles, "SCRATCH_BYTES", 1 << 16)
    saved = 4 * 512 * 4096 - (1 << 16)
    blocks = observe(shape)
    assert abs(wide.forward - blocks.forward - saved) <= shape.vectors()
    assert abs(wide.backward - blocks.backward - saved) <= shape.vectors()


@pytest.mark.parametrize("features", [1, 64, 4096, 16384])
@pytest.mark.parametrize("vocab_size", [1, 1000, 32_000, 128_256, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_default_sizes_keep_to_their_bytes(features, vocab_size, dtype):
    size, wide = dtype.itemsize, max(4, dtype.itemsize)
    rows = _sizes.vocab_chunk_or_default(None, vocab_size, features, dtype)
    assert rows == vocab_size or rows % 128 == 0
    assert rows * wide * features <= 64 * MIB or rows == 128
    for tokens in (1, 100, 1 << 20):
        chunk = _sizes.token_chunk_or_default(None, tokens, rows, dtype)
        assert chunk == tokens or chunk % 128 == 0
        assert size * chunk * rows <= 64 * MIB or chunk == min(128, tokens)
        whole = _sizes.token_chunk_or_default(
            None, tokens, vocab_size, dtype, _sizes.WHOLE_VOCABULARY_TILE_BYTES
        )
        assert size * whole * vocab_size <= 256 * MIB or whole == min(128, tokens)


def test_default_sizes_of_an_8b_model():
    assert _sizes.vocab_chunk_or_default(None, 128_256, 4096, torch.bfloat16) == 4096
    tokens = _sizes.token_chunk_or_default(None, 8192, 4096, torch.bfloat16)
    assert tokens == 8192
    whole = _sizes.WHOLE_VOCABULARY_TILE_BYTES
    tokens = _sizes.token_chunk_or_default(None, 8192, 128_256, torch.bfloat16, whole)
    assert tokens == 1024
