"""Parameters that are DTensors already: FSDP2's two-dimensional placement and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import lowtide
from support.bits import same_bits
from support.recorder import Record, Recorder, assert_trains_as_fsdp2
from support.systems import get_system
from support.training import local

NUM_STEPS = 3
SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2)]


# Widths of the model and of its hidden layers.
SIZES = {"even": (8, 12), "uneven": (7, 9), "few": (5, 3)}


class MLP(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def parallel_model(
    system_name: str, shape: tuple[int, int], sizes: str = "even"
) -> Any:
    system = get_system(system_name)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    width, hidden = SIZES[sizes]
    model: Any = nn.Sequential(
        MLP(width, hidden), MLP(width, hidden), nn.Linear(width, 3)
    )
    # torch takes what goes between them for even where it is a plain tensor.
    plain = sizes == "even"
    for block in (model[0], model[1]):
        plan = {
            "up": ColwiseParallel(use_local_output=plain),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh["tp"], plan)
        system.fully_shard(block, mesh=mesh["dp"])
    system.fully_shard(model, mesh=mesh["dp"])
    return model


def train(
    system_name: str, shape: tuple[int, int], sync: bool, sizes: str = "even"
) -> Record:
    model = parallel_model(system_name, shape, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    record = Recorder()
    for step in range(NUM_STEPS):
        for last in (False, True):
            model.set_requires_gradient_sync(sync or last)
            # The ranks of a tensor-parallel group see the same batch.
            replica = dist.get_rank() // shape[1]
            generator = torch.Generator().manual_seed(7 * step + last + 50 * replica)
            x = torch.randn(4, SIZES[sizes][0], generator=generator)
            loss = model(x).pow(2).mean()
            record.add("loss", loss)
            loss.backward()
        record.add_model(model)
        for name, p in model.named_parameters():
            record.add(f"{name} placed {p.placements}", p)
            record.add(f"{name} whole", p.full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    return record.values


@pytest.mark.parametrize("sync", [True, False], ids=("each", "last"))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"dp{s[0]}_tp{s[1]}")
def test_training_equals_fsdp2(pool_of, shape, sync):
    pool = pool_of(shape[0] * shape[1])
    assert_trains_as_fsdp2(pool, train, shape, sync)


@pytest.mark.parametrize("sizes", ["uneven", "few"])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda s: f"dp{s[0]}_tp{s[1]}")
def test_training_of_uneven_parts_equals_fsdp2(pool_of, shape, sizes):
    pool = pool_of(shape[0] * shape[1])
    assert_trains_as_fsdp2(pool, train, shape, False, sizes)


def save(system_name: str, path: Any) -> dict[str, torch.Tensor]:
    model = parallel_model(system_name, (2, 2))
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=path)
    return {name: local(p).clone() for name, p in model.named_parameters()}


def load(system_name: str, path: Any) -> dict[str, torch.Tensor]:
    model = parallel_model(system_name, (2, 2))
    with torch.no_grad():
        for p in model.parameters():
            local(p).zero_()
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    return {name: local(p).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("systems", [("fsdp2", "lowtide"), ("lowtide", "fsdp2")])
def test_checkpoint_crosses(pool_of, tmp_path, systems):
    writer, reader = systems
    pool = pool_of(4)
    saved = pool.run(save, writer, tmp_path / "checkpoint")
    for before, after in zip(
        saved, pool.run(load, reader, tmp_path / "checkpoint"), strict=True
    ):
        assert list(before) == list(after)
        assert all(same_bits(before[name], after[name]) for name in before)


def sequence_parallel_model(system_name: str | None, dp: int = 1) -> Any:
    """The norm's weights are whole on every rank, which sees a part of the sequence:
    its gradient for them is one term of a sum over the tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    model = MLP()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tp"], plan)
    if system_name is not None:
        get_system(system_name).fully_shard(model, mesh=mesh["dp"])
    return model


def sequence_backward(model: Any, microbatch: int) -> None:
    replica, part = divmod(dist.get_rank(), 2)
    generator = torch.Generator().manual_seed(microbatch + 50 * replica)
    x = torch.randn(2, 6, 8, generator=generator).chunk(2, 1)[part]
    (model(x) * (microbatch + 1)).square().mean().backward()


def full_gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def accumulate_without_sync(system_name: str) -> dict[str, torch.Tensor]:
    model = sequence_parallel_model(system_name)
    for microbatch in range(3):
        model.set_requires_gradient_sync(microbatch == 2)
        sequence_backward(model, microbatch)
    return full_gradients(model)


def accumulate_unsharded(ranks_first: bool) -> dict[str, torch.Tensor]:
    model = sequence_parallel_model(None)
    total: dict[str, torch.Tensor] = {}
    for microbatch in range(3):
        sequence_backward(model, microbatch)
        if ranks_first:
            for name, gradient in full_gradients(model).items():
                total[name] = total[name] + gradient if name in total else gradient
            model.zero_grad()
    return total or full_gradients(model)


def test_partial_gradients_are_summed_over_ranks_in_every_microbatch(pool_of):
    """FSDP2 sums what microbatches left on a rank, then over the ranks."""
    pool = pool_of(2)
    by_rule = {
        "fsdp2": pool.run(accumulate_unsharded, False),
        "lowtide": pool.run(accumulate_unsharded, True),
    }
    assert not all(
        same_bits(one, by_rule["lowtide"][0][name])
        for name, one in by_rule["fsdp2"][0].items()
    )
    for system_name, expected in by_rule.items():
        actual = pool.run(accumulate_without_sync, system_name)
        for mine, other in zip(actual, expected, strict=True):
            assert all(same_bits(mine[name], other[name]) for name in other)


def clip(
    system_name: str, norm_type: float, foreach: bool | None, whose: str
) -> Record:
    """``whose``: lowtide's function, or torch's."""
    model = sequence_parallel_model(system_name, dp=2)
    take: Any = lowtide if whose == system_name == "lowtide" else nn.utils
    record = Recorder()
    for step in range(2):
        sequence_backward(model, step)
        before = {name: local(p.grad).clone() for name, p in model.named_parameters()}
        norm = take.clip_grad_norm_(
            model.parameters(), 1e-3, norm_type=norm_type, foreach=foreach
        )
        record.add("norm", norm.full_tensor())
        record.add_model(model)
        whole = torch.cat([g.flatten() for g in full_gradients(model).values()])
        length = torch.linalg.vector_norm(whole, norm_type)
        torch.testing.assert_close(length, torch.tensor(1e-3), rtol=1e-2, atol=0)
        for name, p in model.named_parameters():
            assert not torch.equal(local(p.grad), before[name])
        model.zero_grad()
    return record.values


@pytest.mark.parametrize("whose", ["torch", "lowtide"])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_equals_fsdp2(pool_of, norm_type, foreach, whose):
    assert_trains_as_fsdp2(pool_of(4), clip, norm_type, foreach, whose)
