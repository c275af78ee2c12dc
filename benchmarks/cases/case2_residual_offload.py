"""Case 2: the value between checkpointed blocks, sent to the host."""

from __future__ import annotations

import json
from typing import Any

from case import Case, Row, rows_of
from launch import run

NAME = "case2_residual_offload"
MIB, GIB = 1 << 20, 1 << 30
# A 64th of the report's residual of [16, 4096, 2048] in fp32, per device: 8 MiB.
ROWS, WIDTH, LAYERS, PREFETCH = 16384, 128, 32, 1
RESIDUAL_MIB = ROWS * WIDTH * 4 / MIB
OURS = (
    "nothing named",
    "save hidden",
    "offload hidden",
    "offload residual",
    "offload both",
)
CHECKPOINT = "torch checkpoint"
COPIES = "torch checkpoint, save_on_cpu"
SELECTIVE = "torch checkpoint, SAC MUST_CPU_OFFLOAD"
STOCK = (CHECKPOINT, COPIES, SELECTIVE)
# openxla/xla issue 17541 (device GiB, host GiB), per device, everything included.
PUBLISHED = {
    "nothing named": (20.266, 0.0),
    "save hidden": (35.297, 0.0),
    "offload hidden": (19.75, 16.0),
    "offload residual": (20.266, 0.0),
    "custom gradient": (21.0, 0.5),
}
SILENT = "the policy is accepted and does nothing: every residual stays"
REPORTED = "named and ignored, silently: the report this case comes from"

Seen = dict[str, Any]


def measure(device: str = "cpu") -> list[Row]:
    def program(system: str, layers: int, rows: int = ROWS) -> Seen:
        numbers = map(str, (layers, rows, WIDTH, PREFETCH))
        arguments = ("residual_offload.py", system, *numbers, device)
        return json.loads(run(*arguments, timeout=900))

    seen = {name: program(name, LAYERS) for name in (*OURS, *STOCK)}
    half = {name: program(name, LAYERS // 2) for name in OURS}
    large = program("offload residual", LAYERS // 4, 4 * ROWS)
    cost = json.loads(run("region_cost.py", "400", timeout=300))
    return rows(seen, half, large, cost)


def rows(
    seen: dict[str, Seen], half: dict[str, Seen], large: Seen, cost: dict[str, float]
) -> list[Row]:
    row = rows_of(NAME)
    result = []
    for name, each in seen.items():
        note = SILENT if name == SELECTIVE else ""
        held, host = mib(each["held"]), mib(each["host"])
        result += [
            row(name, "device, held for backward", held, "MiB", "measured", note),
            row(name, "host", host, "MiB", "measured"),
            row(name, "device, peak of the step", mib(each["peak"]), "MiB", "measured"),
        ]
    for name in OURS:
        for what in ("held", "host"):
            slope = (seen[name][what] - half[name][what]) / (LAYERS - LAYERS // 2)
            place = "device, held" if what == "held" else "host"
            quantity = f"{place}: residuals more a layer"
            value = round(slope / seen[name]["residual"], 4)
            result.append(row(name, quantity, value, "", "measured"))
    residuals = large["held"] / large["residual"]
    result.append(
        row(
            "offload residual",
            "four times the batch: residuals held",
            round(residuals, 3),
            "",
            "measured",
            "1 + prefetch, and the stack's output",
        )
    )
    expected = seen[CHECKPOINT]["digests"]
    for name, each in seen.items():
        quantity = "loss and gradients equal torch's checkpoint bit for bit, 3 steps"
        equal = each["digests"] == expected
        result.append(row(name, quantity, equal, "", "measured"))
    for name, each in seen.items():
        beside = round(each["seconds"] / seen[CHECKPOINT]["seconds"], 2)
        quantity = "CPU time of a step beside torch's checkpoint"
        result.append(row(name, quantity, beside, "", "measured"))
    return result + published() + cost_rows(cost)


def published() -> list[Row]:
    row = rows_of(NAME)
    result = []
    for name, (device, host) in PUBLISHED.items():
        note = REPORTED if name == "offload residual" else ""
        quantity = "published, everything included: {}"
        result += [
            row(name, quantity.format("device"), device, "GiB", "published", note),
            row(name, quantity.format("host"), host, "GiB", "published"),
        ]
    return result


def cost_rows(cost: dict[str, float]) -> list[Row]:
    row = rows_of(NAME)
    added = {name: cost[name] - cost["plain"] for name in ("lowtide", "torch")}
    names = {"lowtide": "nothing named", "torch": CHECKPOINT}
    quantity = "host time a region adds to 32 small operators"
    result = [
        row(names[name], quantity, round(value, 1), "us", "measured")
        for name, value in added.items()
    ]
    share = round(added["lowtide"] / added["torch"], 3)
    whole = round(cost["lowtide"] / cost["torch"], 3)
    return [
        *result,
        row("nothing named", "of it beside torch's", share, "", "measured"),
        row(
            "nothing named", "with the operators, beside torch's", whole, "", "measured"
        ),
        row(
            "nothing named",
            "tag in inference mode",
            round(cost["tag_ns"]),
            "ns",
            "measured",
        ),
    ]


def mib(num_bytes: int) -> float:
    return round(num_bytes / MIB, 3)


CASE = Case(
    name=NAME,
    describe="Offload of the residual between checkpointed blocks (xla 17541).",
    how=f"""\
`programs/residual_offload.py`, one process a column: {LAYERS} blocks whose two named
values, the residual between blocks and `hidden` inside, have {RESIDUAL_MIB:.0f} MiB
each in fp32, a 64th of the report's; prefetch {PREFETCH}. *Held*: live bytes by
`AllocationTimeline` between forward and backward, the input of the loss included (one
residual). *Host*: lowtide's own ledger; for `save_on_cpu` the same hooks with a real
copy, because on a CPU torch's saves the tensor itself. Bits: SHA-256 of loss, input
gradient and all parameter gradients of three steps, the second with `retain_graph`
and a second backward. Time is of a CPU, where a copy takes as long as it takes: see it
as a sanity check. `programs/region_cost.py`: 32 operators on 4 elements, 48 saved
tensors, forward and backward, in turns in one process; first decile of the CPU
times of 400. The report's own size is in case2_full_scale.""",
    run=measure,
)
