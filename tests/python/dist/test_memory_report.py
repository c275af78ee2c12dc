"""The ledger's figures are exact: they equal the formulas of docs/design/memory.md,
written out here once more, and the transient does not grow with depth."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide._base.memory import ledger
from lowtide.memory import CATEGORIES
from support.model import TINY, ModelConfig, batch, build, loss_fn
from support.systems import get_system
from support.training import Run, adamw, shard

CPU = torch.device("cpu")
SHAPES = {
    "even": ModelConfig(dim=64, vocab=128, ffn=96, kv_dim=16),
    "uneven": ModelConfig(),
    "empty_shards": TINY,
}
DTYPES = {
    "bf16": (torch.bfloat16, torch.float32),
    "fp32": (None, None),
    "bf16_reduce": (torch.bfloat16, torch.bfloat16),
}


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def wrapped(run: Run) -> Any:
    return shard(build(run.model), run, get_system("lowtide"))


def step(model: Any, run: Run, sync: bool = True) -> None:
    model.set_requires_gradient_sync(sync)
    ids, targets = batch(run.model, 0, 0, dist.get_rank())
    loss_fn(model(ids), targets).backward()


def report_after(run: Run, syncs: tuple[bool, ...]) -> dict[str, Any]:
    """Category figures after a warm-up step and then one backward per `syncs`,
    beside this process's bytes before the model existed and after it is gone."""
    gc.collect()
    before = ledger(CPU).total_live
    model = wrapped(run)
    step(model, run)
    model.zero_grad()
    lowtide.memory_report(model, reset_peaks=True)
    for sync in syncs:
        step(model, run, sync)
    report = lowtide.memory_report(model)
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    del model
    gc.collect()
    return {
        "before": before,
        "left": ledger(CPU).total_live,
        "categories": {k: vars(v) for k, v in report.categories.items()},
        "units": report.units,
        "text": str(report),
    }


class Formulas:
    """docs/design/memory.md, for the units of one model on one rank."""

    def __init__(self, run: Run) -> None:
        self.size = run.world_size
        model = build(run.model)
        blocks = [list(layer.parameters()) for layer in model.layers]
        in_blocks = {id(p) for block in blocks for p in block}
        rest = [p for p in model.parameters() if id(p) not in in_blocks]
        self.units = [rest, *blocks]  # the root first
        self.compute = (run.param_dtype or torch.float32).itemsize
        self.reduce = (run.reduce_dtype or run.param_dtype or torch.float32).itemsize

    def shard_numel(self, p: torch.nn.Parameter) -> int:
        return math.ceil(p.shape[0] / self.size) * p[0].numel()

    def packed(self, unit: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        small = [p for p in unit if 0 < p.numel() * self.compute <= 64 << 10]
        return small if self.size > 1 and len(small) > 1 else []

    def parameters(self) -> int:
        return sum(map(self.unit_parameters, self.units))

    def unit_parameters(self, unit: list[torch.nn.Parameter]) -> int:
        packed = sum(up(self.shard_numel(p), 16) * 4 for p in self.packed(unit))
        in_row = {id(p) for p in self.packed(unit)}
        rest = [p for p in unit if id(p) not in in_row]
        if rest:
            packed = up(packed, 256)
        return packed + sum(up(self.shard_numel(p), 256) * 4 for p in rest)

    def gathered(self) -> int:
        root, *blocks = [
            sum(up(self.size * self.shard_numel(p) * self.compute, 256) for p in unit)
            for unit in self.units
        ]
        return root + max(sum(blocks[i : i + 2]) for i in range(len(blocks)))

    def sharded_gradients(self) -> int:
        return sum(up(self.shard_numel(p), 16) * 4 for u in self.units for p in u)

    def slab(self) -> int:
        flags = [up(len(unit), 128) for unit in self.units]
        columns = [up(self.shard_numel(p), 128) for u in self.units for p in u]
        return self.size * (sum(columns) + sum(flags)) * self.reduce


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_observed_peaks_equal_the_formulas(
    shape: str, dtypes: str, world_size: int, pool_of: Callable[[int], Any]
) -> None:
    param, reduce = DTYPES[dtypes]
    run = Run(
        SHAPES[shape], world_size=world_size, param_dtype=param, reduce_dtype=reduce
    )
    expected = Formulas(run)
    for seen in pool_of(world_size).run(report_after, run, (True,)):
        categories = seen["categories"]
        peaks = {name: row["peak"] for name, row in categories.items()}
        assert peaks["gathered"] == expected.gathered()
        assert peaks["sharded_gradients"] == expected.sharded_gradients()
        assert peaks["gradient_slab"] == 0
        assert peaks["parameters"] - seen["before"] == expected.parameters()
        for name, row in categories.items():
            if name != "parameters":
                assert row["peak"] == row["planned"], name
        assert categories["gradient_stream"]["peak"] <= 64 << 20


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_slab_is_all_units_and_lives_from_backward_to_reduction(
    num_ranks: int, pool_of: Callable[[int], Any]
) -> None:
    run = Run(ModelConfig(), world_size=num_ranks)
    expected = Formulas(run).slab()
    for seen in pool_of(num_ranks).run(report_after, run, (False,)):
        slab = seen["categories"]["gradient_slab"]
        assert slab["peak"] == slab["live"] == slab["planned"] == expected
        assert seen["categories"]["sharded_gradients"]["peak"] == 0
    for seen in pool_of(num_ranks).run(report_after, run, (False, True)):
        slab = seen["categories"]["gradient_slab"]
        assert slab["peak"] == expected
        assert slab["live"] == 0


def test_nothing_is_left_when_the_model_is_gone(
    pool_of: Callable[[int], Any],
) -> None:
    for syncs in ((True,), (False,), (False, True)):
        run = Run(ModelConfig(), world_size=2)
        for seen in pool_of(2).run(report_after, run, syncs):
            assert seen["left"] == seen["before"], syncs


def test_transient_does_not_grow_with_depth(pool_of: Callable[[int], Any]) -> None:
    transient = {}
    for num_layers in (4, 8, 16):
        run = Run(replace(ModelConfig(), num_layers=num_layers), world_size=2)
        seen = pool_of(2).run(report_after, run, (True,))[0]["categories"]
        transient[num_layers] = sum(
            seen[name]["peak"]
            for name in ("gathered", "gather_input", "gradient_stream")
        )
    assert len(set(transient.values())) == 1, transient


def leases_by_phase(run: Run) -> dict[str, Any]:
    model = wrapped(run)
    optimizer = adamw(model)
    book = ledger(CPU)
    counts = []
    for _ in range(4):
        book.reset_peaks()
        ids, targets = batch(run.model, 0, 0, dist.get_rank())
        loss = loss_fn(model(ids), targets)
        forward = {name: book.num_leases(name) for name in CATEGORIES}
        loss.backward()
        whole = {name: book.num_leases(name) for name in CATEGORIES}
        optimizer.step()
        optimizer.zero_grad()
        counts.append((forward, whole))
    return {"counts": counts}


def test_forward_leases_nothing_that_belongs_to_backward(
    pool_of: Callable[[int], Any],
) -> None:
    run = Run(ModelConfig(num_layers=3), world_size=2)
    counts = pool_of(2).run(leases_by_phase, run)[0]["counts"]
    for forward, _ in counts:
        assert forward["gradient_stream"] == 0
        assert forward["gradient_slab"] == 0
        assert forward["sharded_gradients"] == 0


def test_steady_steps_lease_the_same_few_buffers(
    pool_of: Callable[[int], Any],
) -> None:
    run = Run(ModelConfig(num_layers=3), world_size=2)
    counts = pool_of(2).run(leases_by_phase, run)[0]["counts"]
    assert counts[2] == counts[3]
    steady = counts[3][1]
    assert steady["parameters"] == 0
    # Root once; three blocks in forward, three again in backward.
    assert steady["gathered"] == steady["gather_input"] == 7
    assert steady["gradient_stream"] <= 4  # slots of the ring
    assert steady["sharded_gradients"] == 4


def replicated(num_layers: int, all_reduce: bool) -> tuple[dict[str, Any], int]:
    """Of the sharded gradients of equal layers, and the bytes of a layer's sum over
    replicas; four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = nn.Sequential(*(nn.Linear(32, 32) for _ in range(num_layers)))
    for layer in model:
        lowtide.fully_shard(layer, mesh=mesh)
    lowtide.fully_shard(model, mesh=mesh)
    x = torch.ones(2, 32)
    model(x).sum().backward()
    model.zero_grad()
    lowtide.memory_report(model, reset_peaks=True)
    model.set_requires_all_reduce(all_reduce)
    model(x).sum().backward()
    report = lowtide.memory_report(model)
    row = vars(report.categories["sharded_gradients"])
    return row, max(unit["partial_gradients"] for unit in report.units.values())


@pytest.mark.parametrize("num_layers", [4, 9])
def test_sums_over_replicas_live_beside_three_units_at_most(pool_of, num_layers):
    for row, of_a_sum in pool_of(4).run(replicated, num_layers, True):
        # A shard's weight and bias; in a sum, rounded up to 64 elements, and two flags.
        assert of_a_sum == 4 * (16 * 32 + 64 + 2)
        shown = num_layers * 4 * (16 * 32 + 16)
        assert row["planned"] == shown + 3 * of_a_sum
        # gloo's threads keep one more as long as they like.
        assert shown < row["peak"] <= shown + 4 * of_a_sum


def test_what_is_not_summed_over_replicas_stays(pool_of):
    for row, of_a_sum in pool_of(4).run(replicated, 4, False):
        assert row["live"] == row["peak"] == row["planned"] == 4 * of_a_sum


def test_report_is_a_table_with_planned_beside_observed(
    pool_of: Callable[[int], Any],
) -> None:
    text = pool_of(1).run(report_after, Run(), (True,))[0]["text"]
    header, *rows = text.splitlines()[1:]
    assert header.split() == ["category", "live", "peak", "at", "peak", "planned"]
    assert [row.split()[0] for row in rows[:7]] == list(CATEGORIES)
    assert "planned: arithmetic" in rows[-1]


def test_report_refuses_an_unsharded_model() -> None:
    with pytest.raises(ValueError, match="sharded or checkpointed by lowtide, got"):
        lowtide.memory_report(torch.nn.Linear(2, 2))
