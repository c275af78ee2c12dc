"""A Llama's training step under the sharding systems of others, beside lowtide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from case import Case, Row, rows_of
from foreign import Absent, foreign
from points import Points

from lowtide.phantom.dry.launch import Machine

NAME = "peers"
PROGRAM = "peers.py"
GIB = 1 << 30
WORLDS = (8, 64, 256)
TIMEOUT = 3600.0  # seconds
LOSSES = {
    "plain": "loss over whole logits",
    "chunked:32": "loss over 32 chunks of tokens",
    "vocabulary": "loss over rows of the head",
}
PLAIN, CHUNKED = ("--loss", "plain"), ("--loss", "chunked:32")


@dataclass(frozen=True)
class System:
    name: str
    program: str  # its name in benchmarks/programs/peers.py
    settings: str
    # The one that reserves least is shown.
    losses: tuple[tuple[str, str], ...] = (PLAIN, CHUNKED)
    memory: int | None = None  # bytes of the GPU, where they are not an H100's
    foreign: bool = True  # its package is in LOWTIDE_FOREIGN


SYSTEMS = (
    System(
        *("lowtide, same loss", "lowtide", "a unit a block, embedding, head"),
        foreign=False,
    ),
    System(
        *("lowtide, best loss", "lowtide", "its loss over rows of the head"),
        losses=(("--loss", "vocabulary"),),
        foreign=False,
    ),
    System(
        *("FSDP2", "fsdp2", "a unit a block, embedding, head; fp32 reduction"),
        foreign=False,
    ),
    System(
        *("FSDP1", "fsdp1", "a unit a block, limit_all_gathers, use_orig_params"),
        foreign=False,
    ),
    System(
        "Megatron-FSDP 0.6.1",
        "megatron_fsdp",
        "a unit a block, strategy 3, fp32 main parameters, gradients and reduction",
    ),
    System(
        "DeepSpeed 0.19.8, ZeRO-3",
        "deepspeed",
        "zero.Init, overlap_comm, contiguous_gradients, its documented sizes, fp32 "
        "reduction",
    ),
    System(
        "SimpleFSDP of torchtitan",
        "simple_fsdp",
        "compiled whole by inductor, transformer_block_bucketing, gathered again",
        losses=(PLAIN,),
    ),
    System(
        "DDP",
        "ddp",
        "autocast, gradient_as_bucket_view, static_graph; fits on no GPU of one rank, "
        "so run as if an H100 had 1 TiB",
        memory=1 << 40,
        foreign=False,
    ),
)


def options_of(system: System, world: int, loss: tuple[str, str]) -> tuple[str, ...]:
    return ("--system", system.program, "--world", str(world), *loss)


def rows_of_run(system: System, world: int, figures: dict[str, Any]) -> Iterator[Row]:
    row = rows_of(NAME)
    of = f"8B, {world} ranks"
    note = f"{system.settings}; {LOSSES[figures['loss']]}"
    steady, step = figures["steady"], figures["time"]["step"]
    for quantity, value, unit in (
        ("reserved", round(steady["reserved"] / GIB, 2), "GiB"),
        ("allocated", round(steady["allocated"] / GIB, 2), "GiB"),
        ("step", round(1e3 * step["seconds"], 1), "ms"),
        ("exposed communication", round(1e3 * step["exposed"], 1), "ms"),
    ):
        said = note if quantity == "reserved" else ""
        yield row(system.name, f"{quantity}, {of}", value, unit, "simulated", said)


class _Runs(Points):
    """On an H100, or on one with the memory that its system needs."""

    def _machine(self, arguments: Sequence[str]) -> Machine:
        program = arguments[arguments.index("--system") + 1]
        memory = {system.program: system.memory for system in SYSTEMS}[program]
        return replace(super()._machine(arguments), memory=memory)


def rows_of_system(
    system: System, world: int, runs_of: _Runs | None = None
) -> list[Row]:
    if system.foreign:
        foreign("packages")
    runs_of = runs_of or _Runs(PROGRAM, timeout=TIMEOUT)
    runs = runs_of.each([options_of(system, world, loss) for loss in system.losses])
    named = [
        run | {"loss": loss[1]} for run, loss in zip(runs, system.losses, strict=True)
    ]
    best = min(named, key=lambda run: run["steady"]["reserved"])
    return list(rows_of_run(system, world, best))


def absent(system: System, world: int, why: Absent) -> Row:
    quantity = f"reserved, 8B, {world} ranks"
    return rows_of(NAME)(system.name, quantity, None, "GiB", "missing", str(why))


def measure() -> list[Row]:
    runs_of = _Runs(PROGRAM, timeout=TIMEOUT)
    result: list[Row] = []
    for world in WORLDS:
        for system in SYSTEMS:
            try:
                result += rows_of_system(system, world, runs_of)
            except Absent as why:
                result.append(absent(system, world, why))
    return result


CASE = Case(
    name=NAME,
    describe="Memory and time of a step under other sharding systems.",
    how="""\
Llama 3 8B, one sequence of 8,192 tokens a rank, every block checkpointed, fp32
parameters and AdamW states, bf16 compute, gradients clipped by their norm; the third
step. Run over the [driver that computes nothing](design/phantom.md), each system as its
package or torch has it and tuned by its own documentation (the note of each row); of a
loss over whole logits and one over 32 checkpointed chunks of tokens the one that
reserves less. The time is that of the [clock](time.md), whose host costs are
assumptions. With torch 2.15's NCCL group compute waits for each of DDP's reductions
([torch_versions.md](torch_versions.md#what-a-plan-shows-of-it)).

Packages and the clone of pytorch/torchtitan come from the folder that `LOWTIDE_FOREIGN`
names, as for the published figures. In Megatron-FSDP the check that asks every rank
where its parts end is answered without them, as the other ranks are not there, and the
`reset_parameters` that it asks of modules on the meta device does nothing.

![Peak reserved by sharding system](memory.svg)
""",
    run=measure,
    parts={
        f"{system.name}, {world} ranks": partial(rows_of_system, system, world)
        for world in WORLDS
        for system in SYSTEMS
    },
    only_by_name="half an hour, and wants packages of others",
)
