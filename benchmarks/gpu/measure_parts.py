"""Links, kernels and the host's time: what a step is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import bars
from bars import row, with_bar
from case import Row
from figures import Figures, Programs
from scale import Scale

DIRECTIONS = {"h2d": "to the device", "d2h": "to the host", "both": "both at once"}


# Whose shifts may differ: what the process reserves first and two pairs behind.
RESERVATIONS = 3


def links(scale: Scale, programs: Programs) -> Figures:
    return programs("links.py", scale.link_bytes, scale.rounds)


def links_rows(figures: Figures) -> Iterator[Row]:
    for key, direction in DIRECTIONS.items():
        yield row("link", f"link, {direction}", figures[key], "GB/s", "measured")


def kernels(scale: Scale, programs: Programs) -> Figures:
    return programs("kernels.py", scale.kernel_elements, scale.rounds)


def kernels_rows(figures: Figures) -> Iterator[Row]:
    for name, rate in figures.items():
        system = "copy" if name == "copy" else "lowtide"
        yield row(system, f"kernel: {name}", rate, "GB/s", "measured")
        if name != "copy":
            share = rate / figures["copy"]
            yield row("lowtide", f"kernel beside copy: {name}", share, "", "measured")


def step_kernels(scale: Scale, programs: Programs) -> Figures:
    options = (*scale.llama, "--loss", scale.llama_loss, "--rounds", scale.rounds)
    return programs("step_kernels.py", *options)


def step_kernels_rows(figures: Figures) -> Iterator[Row]:
    """World 1: a reduction is a copy there, and lowtide copies what it lands."""
    for system, seen in figures.items():
        for kind, ms in seen["kinds"].items():
            yield row(system, f"of a step's kernels: {kind}", ms, "ms", "measured")


def addresses(scale: Scale, programs: Programs) -> Figures:
    return {"CUDA": programs("addresses.py"), "dry": programs.dry("addresses.py")}


def addresses_rows(figures: Figures) -> Iterator[Row]:
    """What a reservation lies beside is the process's own; within it places count."""
    shifts = Counter(
        here - dry
        for (_, here), (_, dry) in zip(figures["CUDA"], figures["dry"], strict=True)
    )
    most = sum(count for _, count in shifts.most_common(RESERVATIONS))
    quantity = f"calls of {shifts.total()} that are answered as dry, but for a shift"
    yield row("CUDA", quantity, most, "", "measured")


def host_units(scale: Scale, programs: Programs) -> Figures:
    return programs("host_units.py", scale.host_layers, scale.host_steps)


def host_units_rows(figures: Figures) -> Iterator[Row]:
    """Of what sharding adds, a part is the fake group's, which no real group spends."""
    plain = sum(figures["plain"]["phases"].values())
    for system in ("lowtide", "fsdp2"):
        seen = figures[system]
        added = sum(seen["phases"].values()) - plain
        yield row(system, "host time per unit", added, "us", "measured")
        for phase, value in seen["phases"].items():
            more = value - figures["plain"]["phases"][phase]
            yield row(system, f"host time per unit, {phase}", more, "us", "measured")
        group = seen["group"]
        what = "of it in the process group"
        calls = ", ".join(f"{n:.2f} {call}" for call, n in seen["calls"].items())
        note = f"the same calls alone; per unit {calls}"
        yield row(system, what, group, "us", "measured", note)
        outside = "host time per unit outside the process group"
        yield row(system, outside, added - group, "us", "measured")
    yield row("plain", "host time of an unsharded block", plain, "us", "measured")


# -- optimizer ------------------------------------------------------------------------


def optimizer(scale: Scale, programs: Programs) -> Figures:
    return programs("optimizer_time.py", scale.host_steps)


def optimizer_rows(figures: Figures) -> Iterator[Row]:
    for variant, kinds in figures.items():
        what = f"host time of AdamW, {variant}, per parameter"
        for kind, seen in kinds.items():
            yield row(kind, what, seen["us"], "us", "measured")
    ours = figures["fused"]["lowtide"]["us"]
    quantity = "host time of fused AdamW per parameter, as it stands"
    yield from with_bar(quantity, ours, bars.OPTIMIZER_US, unit="us")
