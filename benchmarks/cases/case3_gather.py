"""Case 3: the sequence-parallel gather, done again in backward instead of saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import sequence_parallel as program
import torch
from case import Case, Row, rows_of
from launch import run

from lowtide.phantom.dry.launch import Machine
from support.ranks import RankPool

NAME = "case3_gather"
MIB, GIB = 1 << 20, 1 << 30
SEQUENCE, SIZES = 8192, (4, 8)
# dim and layers of the models; both have two sites a layer.
MODELS = {"8b": (4096, 32), "70b": (8192, 80)}
SITES_A_LAYER = 2
WORLD_SIZES = (2, 4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Held = dict[str, int]


def measure() -> list[Row]:
    return [*(row for rows in PARTS.values() for row in rows()), *measured()]


# -- full shapes, simulated ---------------------------------------------------------


def simulated(config: str, size: int) -> Iterator[Row]:
    arguments = ("sequence_parallel.py", config, str(size), str(SEQUENCE))
    found = json.loads(run(*arguments, machine=Machine(world=size), timeout=900))
    layers = {
        system: (three["held"] - two["held"], three)
        for system, (two, three) in found.items()
    }
    yield from simulated_rows(config, size, layers)


PARTS = {
    f"{config}, {size} ranks": partial(simulated, config, size)
    for config in MODELS
    for size in SIZES
}


def simulated_rows(
    config: str, size: int, layers: dict[str, tuple[int, Held]]
) -> Iterator[Row]:
    row = rows_of(NAME)
    dim, num_layers = MODELS[config]
    name = f"{config.upper()}, t {size}"
    gathered = SEQUENCE * dim * 2
    for system, (slope, three) in layers.items():
        quantity = f"{name}: held for backward, a layer"
        yield row(system, quantity, mib(slope), "MiB", "simulated")
        quantity = f"{name}: highest in backward, 3 layers"
        yield row(system, quantity, mib(three["peak"]), "MiB", "simulated")
    less = layers[program.SAVED][0] - layers[program.LOWTIDE][0]
    share = 1 - less / (SITES_A_LAYER * gathered)
    quantity = f"{name}: a site holds of its gathered bytes"
    yield row(program.SAVED, quantity, 1.0, "", "arithmetic")
    yield row(program.LOWTIDE, quantity, share, "", "simulated")
    yield row("1 / t", quantity, 1 / size, "", "arithmetic")
    quantity = f"{name}: less held, {num_layers} layers"
    total = less * num_layers / GIB
    yield row(program.LOWTIDE, quantity, round(total, 4), "GiB", "simulated")
    bar = SITES_A_LAYER * num_layers * gathered * (1 - 1 / size) / GIB
    yield row("1 / t", quantity, bar, "GiB", "arithmetic")


# -- small shapes, run --------------------------------------------------------------


def measured() -> Iterator[Row]:
    for world in WORLD_SIZES:
        with RankPool(world) as pool:
            for name, dtype in DTYPES.items():
                seen = {
                    system: pool.run(program.train, system, dtype, torchs)
                    for system, torchs in (
                        (program.LOWTIDE, False),
                        (program.SAVED, True),
                        (program.CHECKPOINT, True),
                        (program.SELECTIVE, True),
                    )
                }
                yield from measured_rows(world, name, seen)


def measured_rows(
    world: int, dtype: str, seen: dict[str, list[dict[str, Any]]]
) -> Iterator[Row]:
    row = rows_of(NAME)
    where = f"gloo, {world} ranks, {dtype}"
    expected = [each["digest"] for each in seen[program.SAVED]]
    for system, ranks in seen.items():
        if system != program.SAVED:
            equal = [each["digest"] for each in ranks] == expected
            quantity = f"{where}: loss and gradients equal gather saved's bit for bit"
            yield row(system, quantity, equal, "", "measured")
        for phase in ("forward", "backward"):
            for kind, calls in ranks[0][phase].items():
                quantity = f"{where}: {kind} a block, {phase}"
                yield row(system, quantity, calls / 2, "", "measured")
    for site, count in seen[program.LOWTIDE][0]["regathers"].items():
        quantity = f"{where}: gathers of '{site}' a block in backward"
        yield row(program.LOWTIDE, quantity, count / 2, "", "measured")


def mib(num_bytes: int) -> float:
    return round(num_bytes / MIB, 3)


CASE = Case(
    name=NAME,
    describe="Rematerialised sequence-parallel gathers (jax 25010, xla 19163).",
    how=f"""\
*simulated*: `programs/sequence_parallel.py` over the
[dry driver](design/phantom.md), one rank's part of Llama blocks in bf16, batch
1, sequence {SEQUENCE}, over t ranks; bytes allocated between forward and backward,
without parameters and the input, three layers less two. Unique storages by
construction: it is the allocator that counts. Two sites a layer: `attn_in` in front of
Q, K and V, `ffn_in` in front of gate and up. *a site holds*: from the difference to
gather saved. *highest in backward*: beyond parameters, with their gradients, without
cuBLAS's workspaces; with SAC the inputs of a block's two gathers are in it, which
NCCL's group keeps until somebody waits for what was gathered.

*measured*: two small blocks on gloo, the second of two steps; collectives counted by
lowtide's counter and a dispatch mode that sees torch's. All systems but lowtide use
torch's functional collectives there; in the simulation only SAC does, which must see
them as operators. A block's own backward gathers twice (of the reduce-scatters) and
reduce-scatters twice (of the gathers); what is above that is done again. torch's
checkpoint runs the block again, up to the last tensor needed; SAC keeps products and
attention, and gathers again with all the rest.""",
    run=measure,
    parts=PARTS,
)
