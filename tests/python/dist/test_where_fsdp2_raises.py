"""What FSDP2 refuses, or only refuses, beside what lowtide does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lowtide._torch_version import VERSION
from support.bits import assert_same_tensors, same_bits
from support.layers import wrap
from support.left_fold import left_fold
from support.reference import owned_rows
from support.systems import get_system


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- sparse gradients ---------------------------------------------------------------


def sparse_embedding(system_name: str, sparse: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 2))
    model = wrap(get_system(system_name), model, [model[0]])
    ids = torch.tensor([[1, 5, 5], [0, 8, dist.get_rank()]])
    model(ids).pow(2).sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def refused_sparse() -> str:
    return error_of(lambda: sparse_embedding("fsdp2", True))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sparse_gradient_of_an_embedding_arrives_dense(pool_of, num_ranks):
    pool = pool_of(num_ranks)
    for sparse, dense, theirs in zip(
        pool.run(sparse_embedding, "lowtide", True),
        pool.run(sparse_embedding, "lowtide", False),
        pool.run(sparse_embedding, "fsdp2", False),
        strict=True,
    ):
        for a, b, c in zip(sparse, dense, theirs, strict=True):
            assert same_bits(a, b) and same_bits(a, c)


def test_fsdp2_raises_in_backward_for_it(pool_of):
    for text in pool_of(2).run(refused_sparse):
        assert "Could not run" in text and "Sparse" in text


# -- several dtypes in one unit -----------------------------------------------------


class Mixed(nn.Module):
    """Layers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3).bfloat16()
        self.third = nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)).bfloat16())
        return self.third(y.double())


def batch_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=generator)


def train_mixed(system_name: str) -> dict[str, torch.Tensor]:
    """Whole gradients of the last step, and parameters after it."""
    system = get_system(system_name)
    torch.manual_seed(0)
    model: Any = wrap(system, Mixed(), [])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch_of(step, dist.get_rank())).pow(2).sum().backward()
        optimizer.step()
    whole = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    return whole | {
        f"{n}.grad": p.grad.full_tensor().clone() for n, p in model.named_parameters()
    }


def train_mixed_alone(num_ranks: int) -> dict[str, torch.Tensor]:
    """All ranks' batches one after the other, gradients averaged in their dtype."""
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        by_rank = []
        for rank in range(num_ranks):
            model.zero_grad()
            model(batch_of(step, rank)).pow(2).sum().backward()
            by_rank.append([p.grad for p in model.parameters()])
        for p, *grads in zip(model.parameters(), *by_rank, strict=True):
            shards = [
                left_fold([grad[rows] for grad in grads], owner) / num_ranks
                for owner, rows in enumerate(owned_rows(len(p), num_ranks))
            ]
            p.grad = torch.cat(shards)
        optimizer.step()
    found = {n: p.detach() for n, p in model.named_parameters()}
    return found | {f"{n}.grad": p.grad for n, p in model.named_parameters()}


def refused_dtypes() -> str:
    return error_of(lambda: train_mixed("fsdp2"))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_dtypes_may_be_mixed_in_a_unit(pool_of, num_ranks):
    expected = pool_of(1).run(train_mixed_alone, num_ranks)[0]
    for found in pool_of(num_ranks).run(train_mixed, "lowtide"):
        assert_same_tensors(found, expected, "mixed dtypes")


def test_fsdp2_raises_in_forward_for_them(pool_of):
    for text in pool_of(2).run(refused_dtypes):
        assert "uniform original parameter dtype" in text, text


# -- finalize_backward --------------------------------------------------------------


def finalized(system_name: str, how: str) -> tuple[str, list[torch.Tensor]]:
    """The error, and gradients of two microbatches."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    mesh = replicas if how == "replicas_apart" else None
    for module in (model[0], model):
        get_system(system_name).fully_shard(module, mesh=mesh)
    # FSDP2's units whose inputs require no gradient send theirs at the end.
    x = torch.full((3, 4), dist.get_rank() + 0.5, requires_grad=True)

    def backwards() -> None:
        model.set_manual_backward_finalization(how != "by_default")
        if how == "replicas_apart":
            model.set_requires_all_reduce(False)
        else:
            model.set_requires_gradient_sync(False)
        for _ in range(2):
            out = model(x)
            if how == "within":
                out.register_hook(lambda _: model.finalize_backward())
            out.square().sum().backward()
        if how == "replicas_apart":
            model.set_requires_all_reduce(True)
        model.set_requires_gradient_sync(True)
        if how == "twice":
            model.finalize_backward(async_op=True)
        (model[0] if how == "unit" else model).finalize_backward()

    error = error_of(backwards)
    return error, [] if error else [p.grad.full_tensor() for p in model.parameters()]


FINALIZED = {
    "by_default": "requires manual backward finalization",
    "unit": "must be called on the root",
    "twice": "must be waited on",
}


@pytest.mark.parametrize("how", FINALIZED)
def test_backward_is_finalized_whoever_asks(pool_of, how):
    expected = pool_of(2).run(finalized, "lowtide", "by_hand")
    for (error, mine), (_, other) in zip(
        pool_of(2).run(finalized, "lowtide", how), expected, strict=True
    ):
        assert not error and len(other) == 4
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(VERSION < (2, 15), reason="of torch 2.15")
@pytest.mark.parametrize("how", FINALIZED)
def test_fsdp2_asks_for_a_mode_the_root_and_one_at_a_time(pool_of, how):
    for error, _ in pool_of(2).run(finalized, "fsdp2", how):
        assert error.startswith("RuntimeError: ") and FINALIZED[how] in error


def test_sums_that_wait_for_replicas_are_not_finalized(pool_of):
    (text, _), _ = pool_of(2).run(finalized, "lowtide", "replicas_apart")
    assert text.startswith(
        "RuntimeError: lowtide: FSDPModule.finalize_backward: expected gradients that "
        "wait for all of their reduction, got those of the unit '"
    )
    assert text.endswith(
        "', summed but for the replicas. Call set_requires_all_reduce(True) before the "
        "last microbatch's backward."
    )
    if VERSION >= (2, 15):
        (theirs, _), _ = pool_of(2).run(finalized, "fsdp2", "replicas_apart")
        assert theirs.startswith("RuntimeError: FSDP manual backward finalization")
        assert "does not support partial gradient reductions" in theirs


def test_no_backward_is_finalized_within_itself(pool_of):
    for error, _ in pool_of(2).run(finalized, "lowtide", "within"):
        assert error == (
            "RuntimeError: lowtide: FSDPModule.finalize_backward: expected a backward "
            "that is over, got one under way. Call it behind backward()."
        )


# -- both refuse --------------------------------------------------------------------


def deepcopy_of(system_name: str) -> str:
    module = get_system(system_name).fully_shard(nn.Linear(2, 2))
    return error_of(lambda: copy.deepcopy(module))


def test_deepcopy_is_refused_with_fsdp2s_exception(pool_of):
    (theirs,) = pool_of(1).run(deepcopy_of, "fsdp2")
    (ours,) = pool_of(1).run(deepcopy_of, "lowtide")
    assert theirs.startswith("AssertionError: FSDP does not support deepcopy")
    assert ours == (
        "AssertionError: lowtide: Linear: expected a module that is not sharded to "
        "deepcopy, got a sharded one. Use state_dict, or copy before fully_shard."
    )
