"""Networks of experts at 64 ranks: torchtitan's trainer and a loop over transformers,
unedited, under FSDP2 and under `lowtide run`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from case import Case, Row, rows_of
from foreign import Absent

from cases.foreign_scripts import GIB, Script, plan_of
from cases.time_llama import calls_and_bytes, ms
from lowtide._torch_version import VERSION

NAME = "experts"
STORED = Path(__file__).parents[1] / "results" / f"{NAME}.json"
WORLD = 64
DEFERRED = "deferred logits"
# What we set out to reach, of FSDP2's.
BARS = {"exposed communication": 1.0, "communication": 1.05}
HELD_BAR = 1.06  # of reserved beside allocated with our loss


@dataclass(frozen=True)
class Network:
    """``program`` of benchmarks/programs with its arguments; ``torch``: what it runs
    with, "" for any; ``defers``: its loss is over whole logits, which `lowtide run` may
    defer; ``shared``: with one communicator, too."""

    program: str
    torch: str = ""
    defers: bool = True
    shared: bool = False


NETWORKS = {
    "Qwen3-30B-A3B, transformers": Network("foreign_experts.py qwen3", shared=True),
    "Mixtral-8x7B, transformers": Network("foreign_experts.py mixtral"),
    "Qwen3-30B-A3B, torchtitan 0.3, experts over 8 ranks": Network(
        "titan_configured.py qwen3 qwen3_30b_a3b no_graphs experts_over_8",
        torch="2.15",
        defers=False,
    ),
    "Mixtral-8x7B of torchtitan 0.3's parts, experts over 8 ranks": Network(
        "titan_configured.py mixtral mixtral_8x7b no_graphs experts_over_8",
        torch="2.15",
        defers=False,
    ),
}
SYSTEMS = {
    "fsdp2": "fsdp2",
    "lowtide": "lowtide",
    DEFERRED: "lowtide --defer-logits",
}

Plan = dict[str, Any]


def rows_at(network: str) -> list[Row]:
    wanted = NETWORKS[network].torch
    if wanted and wanted != ".".join(map(str, VERSION)):
        raise Absent(f"its torchtitan runs with torch {wanted}")
    plans = {
        system: plan_of(script(network, how), "--time")[0]
        for system, how in SYSTEMS.items()
        if system != DEFERRED or NETWORKS[network].defers
    }
    row, found = rows_of(NAME), []
    for system, plan in plans.items():
        deferred = system == DEFERRED
        name = "lowtide" if deferred else system
        loss = DEFERRED if deferred else "same loss"
        quantity = f"reserved, {network}, {loss}"
        note = f"allocated {gib(plan['peak_allocated'])}, peak in {plan['peak_moment']}"
        value = gib(plan["peak_reserved"])
        found.append(row(name, quantity, value, "GiB", "simulated", note))
        if name == "lowtide":
            # FSDP2 makes the logits in either case.
            theirs = plans["fsdp2"]["peak_reserved"]
            share = round(plan["peak_reserved"] / theirs, 3)
            quantity = f"of FSDP2's reserved, {network}, {loss}"
            found.append(row(name, quantity, share, "", "arithmetic"))
        if deferred:
            quantity = f"reserved / allocated, {network}, {loss}"
            held = round(plan["peak_reserved"] / plan["peak_allocated"], 3)
            found.append(row(name, quantity, held, "", "arithmetic"))
            found.append(row("bar", quantity, HELD_BAR, "", "arithmetic"))
    times = {system: times_of(plans[system]) for system in ("lowtide", "fsdp2")}
    calls = {system: calls_of(plans[system]) for system in times}
    for what, theirs in times["fsdp2"].items():
        ours = times["lowtide"][what]
        for system, seconds in (("lowtide", ours), ("fsdp2", theirs)):
            quantity = f"{what}, {network}"
            note = calls[system] if what == "communication" else ""
            found.append(row(system, quantity, ms(seconds), "ms", "simulated", note))
        quantity = f"of FSDP2's {what}, {network}"
        share = round(ours / theirs, 3)
        found.append(row("lowtide", quantity, share, "", "arithmetic"))
        if what in BARS:
            found.append(row("bar", quantity, BARS[what], "", "arithmetic"))
    if NETWORKS[network].defers:
        step = times_of(plans[DEFERRED])["step"]
        quantity = f"step, {network}, {DEFERRED}"
        found.append(row("lowtide", quantity, ms(step), "ms", "simulated"))
    if NETWORKS[network].shared:
        step = times_of(plan_of(script(network, "shared"), "--time")[0])["step"]
        quantity = f"step, {network}, one communicator"
        found.append(row("lowtide", quantity, ms(step), "ms", "simulated"))
    return found


def script(network: str, system: str) -> Script:
    return Script(
        *(network, "unedited.py", f"{system} {NETWORKS[network].program}"), world=WORLD
    )


def times_of(plan: Plan) -> dict[str, float]:
    step = plan["step_time"]["step"]
    return {
        "step": step["seconds"],
        "communication": step["communication"],
        "exposed communication": step["exposed"],
    }


def calls_of(plan: Plan) -> str:
    time = plan["step_time"]
    return calls_and_bytes(time["collectives"], time["collective_bytes"])


def gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 2)


def measure() -> Sequence[Row]:
    """Rows of what another torch runs stay as they were."""
    stored = json.loads(STORED.read_text())["rows"] if STORED.exists() else []
    rows = []
    for network in NETWORKS:
        try:
            rows += rows_at(network)
        except Absent:
            rows += [Row(**row) for row in stored if network in row["quantity"]]
    return rows


CASE = Case(
    name=NAME,
    describe="Networks of experts at 64 ranks, unedited: `lowtide run` and FSDP2.",
    how="""\
A loop over transformers' models after torch's tutorial of FSDP2, whose experts are
sharded with their layers over all 64 ranks, Mixtral's eight within each, checkpointed:
4,096 tokens a rank, loss over whole logits. And torchtitan 0.3's trainer in its
configuration of Qwen3-30B-A3B (two sequences of 4,096 tokens a rank, full
checkpointing, the loss by chunks, which is not deferred) but for CUDA graphs, with
experts over groups of 8 ranks (its `expert_parallel_degree`), each rank's sharded over
the eight that have them: a mesh of their own in the block's `fully_shard`. In the same
configuration but for one sequence a rank Mixtral-8x7B, which it does not have: of its
parts of Qwen3 in Mixtral's sizes, without norms of queries and keys
(`programs/titan_mixtral.py`), an expert a rank. As they stand, or under `python -m
lowtide run`. `python -m lowtide plan --time` says what the process reserves (the most
of three steps) and how long the third takes on H100s ([time.md](time.md)); routers are
taken to choose every expert equally often. *deferred logits*: under `lowtide run
--defer-logits`; *one communicator*: under `LOWTIDE_COMMUNICATORS=shared`. *bar*: what
we set out to reach.

Missed bars. Of transformers' Qwen3: its blocks send 2.4 GB of gradients and compute for
less long than that takes: of a step of 735 ms 698 are communication. FSDP2 pays a
ring's latency once a block and hides it behind copies, which count as computing;
lowtide pays it four times. Chunks of 320 MiB instead of 0.6 GB at most took its step 43
ms longer and Mixtral's 10 less (with transformers 5.0). Default segments waste 4 to 5
GiB of Mixtral's, 7 of FSDP2's, between blocks of 0.9 and 1.8 GiB.
Of Qwen3's they waste 5, 6 of FSDP2's, and 1 GiB with deferred logits: at the last
segment (768 MiB) there were holes of 400, 384 and 384 beside blocks of 604 and 384.
Deferring logits spares Mixtral no allocated bytes to speak of: its peak is in a block's
backward, and its vocabulary has 32,000.
Of torchtitan's Mixtral, by a trace: the gradients of a block's dense weights, 161 MiB,
use the slot of its experts', 672 MiB in five chunks, so that compute waits up to 1.6 ms
for the last of these in two of three blocks; a slot of their own would be held beside
it. With torchtitan's Qwen3 FSDP2 computes 12 ms longer (step less exposed), copies of
what it gathered and sends among it, and hides 2 ms more behind that.

A run keeps the rows of what another torch runs. Packages are looked for in the folder
that `LOWTIDE_FOREIGN` names, as for published.""",
    run=measure,
    parts={network: partial(rows_at, network) for network in NETWORKS},
    only_by_name="wants clones of other repositories",
)
