"""What the loss asks of whoever holds the head's rows, and when."""

from __future__ import annotations

import pytest
import torch

from lowtide._base.rows import RowChunk, strided_chunks
from lowtide.losses import linear_cross_entropy
from lowtide.losses._autograd import loss_of_rows
from lowtide.losses._rows import contiguous_chunks
from support.losses import Case, StridedRows, gradients

CPU = torch.device("cpu")
SHAPES = [
    (vocab_size, world_size, rows)
    for vocab_size in (1, 2, 7, 16, 37)
    for world_size in (1, 2, 3, 4, 8, 50)
    for rows in (1, 2, 3, 100)
]


def of_shards(chunk: RowChunk, vocab_size: int, world_size: int) -> list[int]:
    """Vocabulary rows of a chunk, rank after rank, padding as -1."""
    shard = -(-vocab_size // world_size)
    ids = list(range(vocab_size)) + [-1] * (shard * world_size - vocab_size)
    by_rank = [ids[r * shard : (r + 1) * shard] for r in range(world_size)]
    span = slice(chunk.start, chunk.start + chunk.width)
    return [row for ids in by_rank for row in ids[span]]


@pytest.mark.parametrize(("vocab_size", "world_size", "rows"), SHAPES)
def test_strided_chunks_are_what_the_ranks_hold(vocab_size, world_size, rows):
    chunks = strided_chunks(vocab_size, world_size, rows)
    seen: list[int] = []
    for chunk in chunks:
        held = of_shards(chunk, vocab_size, world_size)
        assert len(held) == chunk.num_rows
        assert chunk.width <= rows
        valid = chunk.num_valid(vocab_size)
        assert valid >= 1
        assert -1 not in held[:valid] and set(held[valid:]) <= {-1}
        assert chunk.vocabulary_rows(vocab_size, CPU).tolist() == held[:valid]
        seen += held[:valid]
    assert sorted(seen) == list(range(vocab_size))


@pytest.mark.parametrize(("vocab_size", "world_size", "rows"), SHAPES)
def test_every_target_has_one_place(vocab_size, world_size, rows):
    targets = torch.tensor([*range(vocab_size), -100, -1, vocab_size + 1000])
    found = torch.zeros(len(targets), dtype=torch.int64)
    for chunk in strided_chunks(vocab_size, world_size, rows):
        row, inside = chunk.place(targets)
        assert not row[~inside].any()
        at = chunk.vocabulary_rows(vocab_size, CPU)
        assert torch.equal(at[row[inside]], targets[inside])
        found += inside
    assert found.tolist() == [1] * vocab_size + [0, 0, 0]
    assert targets[0] == 0, "the targets themselves are left alone"


def test_slices_are_chunks_of_one_block():
    assert contiguous_chunks(10, 4) == (RowChunk(0, 4), RowChunk(4, 4), RowChunk(8, 2))
    assert strided_chunks(10, 1, 4) == tuple(
        RowChunk(start, width, blocks=1, stride=10)
        for start, width in ((0, 4), (4, 4), (8, 2))
    )


def run(
    case: Case, rows: StridedRows, frozen: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    leaves, targets = case.tensors()
    for name in frozen:
        leaves[name].requires_grad_(False)
    loss, _ = loss_of_rows(
        leaves["hidden"], leaves["weight"], None, targets, rows, case.objective
    )
    return {"loss": loss.detach(), **gradients(loss, leaves)}


def source(case: Case, world_size: int = 2, rows_per_rank: int = 10) -> StridedRows:
    weight = case.tensors()[0]["weight"]
    return StridedRows(weight, world_size, rows_per_rank)


FORWARD = ["forward", "rows 0", "rows 10", "end"]
FROZEN = ["backward", "rows 0", "rows 10", "end"]
TRAINED = [
    "backward",
    *("rows 0", "buffer 0", "put 0"),
    *("rows 10", "buffer 10", "put 10"),
    *("end", "take"),
]


def test_order_of_calls():
    case = Case()
    rows = source(case)
    run(case, rows)
    assert rows.log == FORWARD + TRAINED


@pytest.mark.parametrize("tokens", [0, 1, 1000])
def test_calls_do_not_depend_on_this_ranks_tokens(tokens):
    """Other ranks wait for the same collectives, also for a rank with no token."""
    case = Case(tokens=tokens)
    rows = source(case)
    found = run(case, rows)
    assert rows.log == FORWARD + TRAINED
    assert found["weight"].shape == (37, 12)
    if not tokens:
        assert not found["weight"].any()


def test_a_frozen_head_is_read_and_gets_no_gradient():
    case = Case()
    rows = source(case)
    found = run(case, rows, frozen=("weight",))
    assert rows.log == FORWARD + FROZEN
    assert list(found) == ["loss", "hidden"]


def test_a_head_is_trained_under_frozen_hidden_states():
    case = Case()
    rows = source(case)
    found = run(case, rows, frozen=("hidden",))
    assert rows.log == FORWARD + TRAINED
    assert torch.equal(found["weight"], run(case, source(case))["weight"])


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 40])
def test_ranks_change_the_order_of_sums_only(world_size):
    case = Case(dtype=torch.float64, label_smoothing=0.1, z_loss=1e-2)
    found = run(case, source(case, world_size, rows_per_rank=2))
    leaves, targets = case.tensors()
    loss = linear_cross_entropy(
        **leaves, targets=targets, vocab_chunk=2, **case.settings
    )
    expected = {"loss": loss.detach(), **gradients(loss, leaves)}
    if world_size == 1:
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.testing.assert_close(found, expected)


def test_a_wrong_target_is_found_before_anything_is_read():
    case = Case()
    rows = source(case)
    leaves, targets = case.tensors()
    targets[7] = 37
    with pytest.raises(ValueError, match="got 37 at token 7"):
        loss_of_rows(
            leaves["hidden"], leaves["weight"], None, targets, rows, case.objective
        )
    assert rows.log == []


def test_a_pass_that_fails_is_closed():
    case = Case()
    rows = source(case)

    def fail(chunk: RowChunk) -> torch.Tensor:
        raise MemoryError("no buffer")

    rows.gradient_buffer = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no buffer") as error:
        run(case, rows)
    assert rows.log == [*FORWARD, "backward", "rows 0", "end"]
    assert error.value.__traceback__ is not None  # frames are alive: not by accident
