"""Bytes a step puts on the wire: counted, planned, and the bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from case import Case, Row, rows_of

from lowtide._sharding.unit import unit_state
from support.model import Llama, ModelConfig, batch, build, loss_fn
from support.ranks import RankPool
from support.systems import get_system
from support.training import Run, shard

NAME = "wire_bytes"
WORLD_SIZES = (2, 4)
MODEL = ModelConfig(dim=64, num_layers=4, vocab=257, kv_dim=16, ffn=168)
COMPUTE, REDUCE = 2, 4  # bytes of bf16 and fp32
COLUMNS = 128  # a chunk's columns are a multiple of this
PIECE = 64  # a parameter's first column in a chunk is one of this
PACKED = 64 << 10  # parameters of at most that many bytes share one gather,
PACKED_PIECE = 16  # in which each takes a multiple of so many elements a rank


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def record(run: Run) -> dict[str, Any]:
    """On every rank: lowtide's own counters over one steady step."""
    model = shard(build(run.model), run, get_system("lowtide"))
    ids, targets = batch(run.model, 0, 0, dist.get_rank())
    state = unit_state(model)
    assert state is not None
    groups = (state.groups.gather, state.groups.reduce)
    for _ in range(2):
        for group in groups:
            group.reset_counters()
        loss_fn(model(ids), targets).backward()
        model.zero_grad()
    counted: dict[str, list[int]] = {}
    for group in groups:
        for kind, (calls, wire_bytes) in group.counters.items():
            sums = counted.setdefault(kind, [0, 0])
            sums[0] += calls
            sums[1] += wire_bytes
    states = [unit_state(m) for m in model.modules()]
    plans = [s.materialized().plan() for s in states if s is not None]
    return {"counted": counted, "chunks": [p["gradient_chunks"] for p in plans]}


class Arithmetic:
    """What a step sends, from the shapes alone."""

    def __init__(self, model: Llama, size: int) -> None:
        self.size = size
        in_blocks = {id(p) for layer in model.layers for p in layer.parameters()}
        root = [p for p in model.parameters() if id(p) not in in_blocks]
        self.units = [root, *(list(layer.parameters()) for layer in model.layers)]
        self.num_parameters = sum(p.numel() for p in model.parameters())

    def shard_numel(self, p: torch.nn.Parameter) -> int:
        return math.ceil(p.shape[0] / self.size) * p[0].numel()

    def wire(self, full_bytes: int) -> int:
        return (self.size - 1) * full_bytes // self.size

    def gather_bytes(self) -> int:
        """The root once, blocks also in backward."""
        return self._gathered(self.gathered_numel)

    def fsdp2_gather_bytes(self) -> int:
        return self._gathered(self.shard_numel)

    def _gathered(self, numel: Callable[[torch.nn.Parameter], int]) -> int:
        return sum(
            gathers * self.wire(self.size * sum(map(numel, unit)) * COMPUTE)
            for gathers, unit in zip(self.num_gathers(), self.units, strict=True)
        )

    def gathered_numel(self, p: torch.nn.Parameter) -> int:
        # Every unit of this model has several small parameters, or none.
        numel = self.shard_numel(p)
        return up(numel, PACKED_PIECE) if p.numel() * COMPUTE <= PACKED else numel

    def num_gathers(self) -> list[int]:
        return [1] + [2] * (len(self.units) - 1)

    def columns(self) -> Iterator[int]:
        """Of each unit's single chunk: pieces, then a flag per parameter."""
        for unit in self.units:
            end = 0
            for p in unit:
                end = up(end, PIECE) + self.shard_numel(p)
            yield up(up(end, PIECE) + len(unit), COLUMNS)

    def reduce_bytes(self) -> int:
        return sum(self.wire(self.size * c * REDUCE) for c in self.columns())

    def fsdp2_reduce_bytes(self) -> int:
        return sum(
            self.wire(self.size * sum(map(self.shard_numel, unit)) * REDUCE)
            for unit in self.units
        )

    def padding(self) -> int:
        """What a step sends beyond its parameters and gradients."""
        bare = sum(
            (gathers * COMPUTE + REDUCE) * sum(p.numel() for p in unit)
            for gathers, unit in zip(self.num_gathers(), self.units, strict=True)
        )
        return self.gather_bytes() + self.reduce_bytes() - self.wire(bare)

    def bound(self) -> int:
        """2 (W-1)/W * 2P + (W-1)/W * 4P: every parameter gathered twice in bf16
        and reduced once in fp32, without padding."""
        full = 2 * COMPUTE * self.num_parameters + REDUCE * self.num_parameters
        return (self.size - 1) * full // self.size


def measure() -> list[Row]:
    rows: list[Row] = []
    for size in WORLD_SIZES:
        run = Run(MODEL, world_size=size)
        with RankPool(size) as pool:
            seen = pool.run(record, run)
        assert all(rank == seen[0] for rank in seen), "ranks send the same"
        assert set(seen[0]["chunks"]) == {1}, "the arithmetic is for one chunk a unit"
        rows += rows_for(size, seen[0]["counted"])
    return rows


def rows_for(size: int, counted: dict[str, list[int]]) -> list[Row]:
    row = rows_of(NAME)
    plan = Arithmetic(build(MODEL), size)
    ranks = f"{size} ranks"
    totals = {
        "lowtide": sum(wire_bytes for _, wire_bytes in counted.values()),
        "plan": plan.gather_bytes() + plan.reduce_bytes(),
        "fsdp2": plan.fsdp2_gather_bytes() + plan.fsdp2_reduce_bytes(),
    }
    parts = {
        "all-gather": {
            "lowtide": counted["all-gather"][1],
            "plan": plan.gather_bytes(),
            "fsdp2": plan.fsdp2_gather_bytes(),
        },
        "reduce-scatter": {
            "lowtide": counted["reduce-scatter"][1],
            "plan": plan.reduce_bytes(),
            "fsdp2": plan.fsdp2_reduce_bytes(),
        },
        "all collectives": {**totals, "bound": plan.bound()},
    }
    rows = [
        row(
            system,
            f"sent a step, {part}, {ranks}",
            value,
            "B",
            "measured" if system == "lowtide" else "arithmetic",
        )
        for part, systems in parts.items()
        for system, value in systems.items()
    ]
    rows += [
        row(
            "lowtide",
            f"counted equals the plan, {ranks}",
            totals["lowtide"] == totals["plan"],
            "",
            "measured",
        ),
        row(
            "plan",
            f"of these padding and flags, {ranks}",
            plan.padding(),
            "B",
            "arithmetic",
        ),
        row(
            "lowtide",
            f"at most the bound plus padding and flags, {ranks}",
            totals["lowtide"] <= plan.bound() + plan.padding(),
            "",
            "measured",
        ),
    ]
    for kind in ("all-gather", "reduce-scatter"):
        calls = counted[kind][0]
        rows.append(
            row("lowtide", f"{kind} calls a step, {ranks}", calls, "", "measured")
        )
    return rows


CASE = Case(
    name=NAME,
    describe="Bytes a rank sends in a step: counted, planned, bound.",
    how="""\
gloo, bf16 compute, fp32 reduction, reduced in every backward; four blocks and a root of
vocabulary 257, whose rows do not divide by the ranks. lowtide's figure is its C++
counter over one steady step: what each call hands to the group, under a
bandwidth-optimal algorithm. *plan* and FSDP2's are arithmetic from the shapes; the
bound is 2 (W-1)/W 2P + (W-1)/W 4P: all parameters gathered twice. Both systems stay
below it because the root is gathered once.""",
    run=measure,
)
