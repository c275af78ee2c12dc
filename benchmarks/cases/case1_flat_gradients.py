"""Case 1: gradients of several microbatches, accumulated in fp32, reduced once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from case import Case, Row, rows_of
from launch import run
from points import Points

NAME = "case1_flat_gradients"
WORLD = 8
SYSTEMS = ("per_parameter", "cat", "flat", "lowtide")
# fairscale pull request 1186, llama3_kv8, one layer, tensor parallel 4, 8 GPUs.
PUBLISHED_GB = {"per_parameter": 15.1, "cat": 17.4, "flat": 15.1}
MIB, GIB = 1 << 20, 1 << 30
CAT_BAR = 0.88  # of what cat reserves
PEAK = "peak above the full parameters"
COPIED = "bytes copied besides additions"
SAME = (
    "the peak is in a later microbatch, where all but cat hold the sums and the same "
    "activations; lowtide's extra KiB is flags and padding"
)
FIRST_TOUCH = "each gradient is copied into the slab once, by its first microbatch"


SEGMENTS: dict[str, tuple[str, ...]] = {"default": (), "expandable": ("--expandable",)}


def measure() -> list[Row]:
    measured = rows(json.loads(run("flat_gradients.py", *SYSTEMS, timeout=900)))
    return [*measured, *(row for of in SEGMENTS for row in simulated_rows(of))]


def simulated_rows(segments: str) -> Iterator[Row]:
    row = rows_of(NAME)
    points = Points("flat_gradients_reserved.py", world=WORLD, timeout=900)
    found = points.each([(name, *SEGMENTS[segments]) for name in SYSTEMS])
    seen = dict(zip(SYSTEMS, found, strict=True))
    quantity = f"reserved at the published widths, {segments} segments"
    for name, peaks in seen.items():
        note = f"allocated {peaks['allocated'] / GIB:.2f}"
        value = round(peaks["reserved"] / GIB, 2)
        yield row(name, quantity, value, "GiB", "simulated", note)
    quantity = f"of what cat reserves, {segments} segments"
    for name, peaks in seen.items():
        share = round(peaks["reserved"] / seen["cat"]["reserved"], 3)
        yield row(name, quantity, share, "", "simulated")
    yield row("bar", quantity, CAT_BAR, "", "arithmetic")


def rows(seen: dict[str, dict[str, Any]]) -> list[Row]:
    row = rows_of(NAME)
    result = []
    for name in SYSTEMS:
        peak = round(seen[name]["peak"] / MIB, 3)
        note = SAME if name == "lowtide" else ""
        result.append(row(name, PEAK, peak, "MiB", "measured", note))
    for name in SYSTEMS:
        saving = round(1 - seen[name]["peak"] / seen["cat"]["peak"], 3)
        result.append(row(name, "less than cat", saving, "", "measured"))
    for name in SYSTEMS[:-1]:
        copied = round(seen[name]["copied"] / MIB, 3)
        result.append(row(name, COPIED, copied, "MiB", "measured"))
    once = round(4 * seen["cat"]["num_parameters"] / MIB, 3)
    result.append(row("lowtide", COPIED, once, "MiB", "arithmetic", FIRST_TOUCH))
    slab = round(seen["lowtide"]["slab"] / MIB, 3)
    result.append(
        row("lowtide", "the slab, with padding and flags", slab, "MiB", "measured")
    )
    for what in ("losses", "gradients"):
        for name in SYSTEMS[1:]:
            equal = seen[name][what] == seen["per_parameter"][what]
            quantity = f"{what} equal per_parameter's bit for bit"
            result.append(row(name, quantity, equal, "", "measured"))
    for name, reserved in PUBLISHED_GB.items():
        quantity = "published: peak reserved on a GPU"
        result.append(row(name, quantity, reserved, "GB", "published"))
    for name, reserved in PUBLISHED_GB.items():
        saving = round(1 - reserved / PUBLISHED_GB["cat"], 3)
        result.append(row(name, "published: less than cat", saving, "", "published"))
    return result


CASE = Case(
    name=NAME,
    describe="Flat fp32 gradients of several microbatches (fairscale 1186).",
    how="""\
`programs/flat_gradients.py`: one layer, embedding and head at a 32nd of the widths
the published figures fit, bf16, four microbatches of 32 tokens, nothing reduced, full
parameters kept. *per_parameter*: each parameter has an fp32 sum of its own; *cat*:
these are then concatenated into the reduce-scatter's input; *flat*: each adds into
its slice of one buffer, zero-filled before the first forward; lowtide: its slab,
allocated in backward, never filled. Live bytes by `AllocationTimeline` up to where
the input of the reduce-scatter is there; what is compared for equality is that input,
for lowtide the `.grad` of a run whose last microbatch reduces, on one rank. The
published figures are bytes reserved on a GPU, everything included: compare the
ratios. *Simulated*: `programs/flat_gradients_reserved.py`, the published widths, four
microbatches of 4 x 1024 tokens, rank 0 of 8, over the
[dry driver](design/phantom.md).""",
    run=measure,
    parts={
        f"{segments} segments": partial(simulated_rows, segments)
        for segments in SEGMENTS
    },
)
