"""torch.ops.lowtide.*: the operators on lists of tensors, and adding rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide  # noqa: F401  registers them

ops = torch.ops.lowtide
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def values(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes).to(dtype)


def rows_of_a_chunk(
    rows: int, columns: int, dtype: torch.dtype, offset: int = 3
) -> Tensor:
    """[rows, columns] inside a wider buffer, not aligned."""
    return values(rows, columns + offset, dtype=dtype)[:, offset:]


def lists(to: torch.dtype, source: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    sizes = ((0,), (1,), (7,), (64,), (4097,), (5, 0), (3, 511))
    destinations = [values(*s, dtype=to) for s in sizes]
    sources = [values(*s, dtype=source) for s in sizes]
    # Shards of several ranks, the last one cut short by padding.
    for world, columns in ((2, 5), (4, 640), (8, 129)):
        destinations.append(rows_of_a_chunk(world, columns, to))
        sources.append(values(world * columns, dtype=source).view(world, columns))
        destinations.append(rows_of_a_chunk(1, columns - 2, to))
        sources.append(values(1, columns - 2, dtype=source))
    destinations.append(values(6, 4, dtype=to))
    sources.append(values(4, 6, dtype=source).t())
    return destinations, sources


CASES: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "foreach_copy_": lambda: (
        ops.foreach_copy_.default,
        lists(torch.float32, torch.bfloat16),
    ),
    "foreach_add_": lambda: (
        ops.foreach_add_.default,
        lists(torch.float32, torch.bfloat16),
    ),
    "foreach_scale_": lambda: (
        ops.foreach_scale_.default,
        (lists(torch.float32, torch.float32)[0], torch.tensor(0.5)),
    ),
    "foreach_l2_norm": lambda: (
        ops.foreach_l2_norm.default,
        (lists(torch.bfloat16, torch.float32)[0],),
    ),
    "add_rows_": lambda: (
        ops.add_rows_.default,
        (
            values(9, 5),
            torch.randint(-1, 11, (20,)),
            values(20, 5, dtype=torch.bfloat16),
        ),
    ),
    "weight_gradient_": lambda: (
        ops.weight_gradient_.default,
        (
            values(9, 5),
            values(20, 9, dtype=torch.bfloat16),
            values(20, 5, dtype=torch.bfloat16),
            True,
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    operator, arguments = CASES[name]()
    passed = torch.library.opcheck(operator, arguments)
    assert passed == {
        "test_schema": "SUCCESS",
        "test_autograd_registration": "SUCCESS",
        "test_faketensor": "SUCCESS",
        "test_aot_dispatch_dynamic": "SUCCESS",
    }


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("to", DTYPES)
def test_copies_as_torch_does(to, source):
    destinations, sources = lists(to, source)
    ops.foreach_copy_(destinations, sources)
    for a, b in zip(destinations, sources, strict=True):
        assert torch.equal(a, b.to(to))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("to", DTYPES)
def test_adds_as_torch_does(to, source):
    destinations, sources = lists(to, source)
    expected = [a.clone().add_(b) for a, b in zip(destinations, sources, strict=True)]
    ops.foreach_add_(destinations, sources)
    for a, b in zip(destinations, expected, strict=True):
        assert torch.equal(a, b)


def test_norm_and_scale_are_those_of_torch():
    gradients = lists(torch.float32, torch.float32)[0]
    norm = torch.nn.utils.get_total_norm(gradients)
    assert torch.equal(ops.foreach_l2_norm(gradients), norm)
    expected = [g * torch.tensor(0.3) for g in gradients]
    ops.foreach_scale_(gradients, torch.tensor(0.3))
    for a, b in zip(gradients, expected, strict=True):
        assert torch.equal(a, b)


def test_rows_are_the_gradient_of_an_embedding():
    indices = torch.randint(0, 30, (200,))
    gradient = torch.randn(200, 16)
    table = torch.zeros(30, 16)
    ops.add_rows_(table, indices, gradient)
    dense = torch.ops.aten.embedding_dense_backward(gradient, indices, 30, -1, False)
    assert torch.equal(table, dense)
    # Rows [10, 20) alone, and without a padding index.
    block = torch.zeros(10, 16)
    ops.add_rows_(block, (indices - 10).masked_fill(indices == 15, -1), gradient)
    padded = torch.ops.aten.embedding_dense_backward(gradient, indices, 30, 15, False)
    assert torch.equal(block, padded[10:20])


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("_")])
def test_version_counters_see_what_is_written(name):
    operator, arguments = CASES[name]()
    written = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
    before = [t._version for t in written]
    operator(*arguments)
    assert [t._version for t in written] == [version + 1 for version in before]


def test_meta_tensors_have_no_kernel_to_run():
    with torch.device("meta"):
        a, b = torch.empty(3, 4), torch.empty(3, 4, dtype=torch.bfloat16)
        norm = ops.foreach_l2_norm([a, b])
        ops.foreach_copy_([a], [b])
        with pytest.raises(ValueError, match=r"pair 0: expected a source of \[3, 4\]"):
            ops.foreach_add_([a], [torch.empty(4)])
    assert (norm.dtype, norm.shape, norm.device.type) == (torch.float32, (), "meta")
