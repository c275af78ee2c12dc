"""Every sum has the order the documentation says: bit for bit a straight program's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lowtide.losses import _tiles, linear_cross_entropy
from lowtide.losses._autograd import loss_of_rows
from support.bits import assert_same_tensors
from support.losses import CASES, Case, StridedRows, gradients, same_order

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A product may round differently on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def wide_products(one_thread) -> Iterator[None]:
    """Products of bf16 with fp32 results, as CUDA has them, on the CPU."""
    library = torch.library.Library("aten", "IMPL")

    def mm(a, b, out_dtype, *, out):
        return torch.mm(a.to(out_dtype), b.to(out_dtype), out=out)

    def addmm(total, a, b, out_dtype, *, beta=1, alpha=1, out):
        assert total is out and (beta, alpha) == (1, 1)
        return out.addmm_(a.to(out_dtype), b.to(out_dtype))

    _tiles.has_wide_product.cache_clear()
    library.impl("mm.dtype_out", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    assert _tiles.has_wide_product(torch.bfloat16, torch.float32, torch.device("cpu"))
    yield
    library._destroy()
    _tiles.has_wide_product.cache_clear()


def slices(vocab_size: int, rows: int) -> list[torch.Tensor]:
    return list(torch.arange(vocab_size).split(rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_vocabulary_chunks(case, dtype, one_thread):
    case = replace(case, dtype=dtype)
    leaves, targets = case.tensors()
    loss = linear_cross_entropy(
        **leaves, targets=targets, token_chunk=9, vocab_chunk=8, **case.settings
    )
    expected = same_order(leaves, targets, case, 9, slices(case.vocab_size, 8))
    assert torch.equal(loss.detach(), expected[0])
    assert_same_tensors(gradients(loss, leaves), expected[1], str(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_with_a_wide_result_are_used_where_they_exist(case, wide_products):
    case = replace(case, dtype=torch.bfloat16)
    leaves, targets = case.tensors()
    loss = linear_cross_entropy(
        **leaves, targets=targets, token_chunk=9, vocab_chunk=8, **case.settings
    )
    chunks = slices(case.vocab_size, 8)
    expected = same_order(leaves, targets, case, 9, chunks, wide_product=True)
    assert torch.equal(loss.detach(), expected[0])
    assert_same_tensors(gradients(loss, leaves), expected[1], str(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_several_ranks(case, dtype, one_thread):
    """Strided rows, padding and a short last rank change the order and nothing else."""
    case = replace(case, dtype=dtype)
    leaves, targets = case.tensors()
    rows = StridedRows(leaves["weight"], world_size=4, rows_per_rank=3)
    loss, _ = loss_of_rows(
        leaves["hidden"],
        leaves["weight"],
        leaves.get("bias"),
        targets,
        rows,
        case.objective,
        token_chunk=9,
    )
    # 37 rows, ten a rank: the last rank has seven.
    chunks = [
        torch.tensor([r for b in range(0, 40, 10) for r in range(b + s, b + e)])
        for s, e in ((0, 3), (3, 6), (6, 9), (9, 10))
    ]
    chunks = [chunk[chunk < 37] for chunk in chunks]
    expected = same_order(leaves, targets, case, 9, chunks)
    assert torch.equal(loss.detach(), expected[0])
    assert_same_tensors(gradients(loss, leaves), expected[1], str(case))


@pytest.mark.parametrize("chunking", ["vocabulary", "tokens"])
def test_blocks_of_a_tile_do_not_change_a_bit(chunking, one_thread, monkeypatch):
    case = Case(bias=False, label_smoothing=0.1, z_loss=1e-3)

    def run() -> dict[str, torch.Tensor]:
        leaves, targets = case.tensors()
        loss = linear_cross_entropy(
            **leaves, targets=targets, chunking=chunking, **case.settings
        )
        return {"loss": loss.detach(), **gradients(loss, leaves)}

    whole = run()
    monkeypatch.setattr(_tiles, "SCRATCH_BYTES", 5 * 4 * case.vocab_size)
    tiles = _tiles.Tiles(23, 37, 12, torch.float32, torch.device("cpu"))
    assert tiles.block_tokens == 5
    assert_same_tensors(run(), whole, "by blocks")


@pytest.mark.parametrize("chunking", ["vocabulary", "tokens"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_two_runs_are_the_same(chunking, dtype):
    case = Case(dtype=dtype, bias=True, tokens=200, vocab_size=300)

    def run() -> dict[str, torch.Tensor]:
        leaves, targets = case.tensors()
        loss = linear_cross_entropy(
            **leaves, targets=targets, chunking=chunking, token_chunk=64
        )
        return {"loss": loss.detach(), **gradients(loss, leaves)}

    assert_same_tensors(run(), run(), "second run")


def test_a_gradient_is_scaled_in_fp32():
    """bf16(1/3) is off by a part in 770: each element would be."""
    gradient = torch.randn(1000).to(torch.bfloat16)
    factor = torch.tensor(1 / 3)
    expected = (gradient.float() * factor).to(torch.bfloat16)
    assert not torch.equal(gradient * factor.to(torch.bfloat16), expected)
    _tiles.scale_in_place(gradient, factor)
    assert torch.equal(gradient, expected)
