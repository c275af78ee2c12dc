"""The two cases on a GPU: flat gradients, and the offload of the residual."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import bars
from bars import row, with_bar
from case import Row
from figures import FLAGS, GIB, Figures, Programs, spread
from scale import Scale

# -- case 1 ---------------------------------------------------------------------------

FLAT_SYSTEMS = ("per_parameter", "cat", "flat", "lowtide", "fused")


def flat_peaks(scale: Scale, programs: Programs) -> Figures:
    widths = ("--widths", scale.flat_widths)
    keys = [(segments, name) for segments in scale.segments for name in FLAT_SYSTEMS]
    seen = programs.together(
        [
            (
                *("flat_gradients_reserved.py", name, *widths),
                *FLAGS[segments],
            )
            for segments, name in keys
        ],
        at_once=len(FLAT_SYSTEMS),
    )
    peaks: Figures = {segments: {} for segments in scale.segments}
    for (segments, name), figures in zip(keys, seen, strict=True):
        peaks[segments][name] = figures
    return peaks


def flat_peaks_rows(figures: Figures) -> Iterator[Row]:
    """``flat`` of the bar is lowtide's slab; *flat* is the one in plain torch."""
    for segments, seen in figures.items():
        setting = f"case 1, {segments} segments"
        for name, peaks in seen.items():
            for kind in ("reserved", "allocated"):
                value = peaks[kind] / GIB
                yield row(name, f"{kind}, {setting}", value, "GiB", "measured")
        of_cat = f"of what cat reserves, {setting}"
        for name, peaks in seen.items():
            share = peaks["reserved"] / seen["cat"]["reserved"]
            if name == "lowtide":
                yield from with_bar(of_cat, share, bars.FLAT_OF_CAT)
            else:
                yield row(name, of_cat, share, "", "measured")


def flat_speed(scale: Scale, programs: Programs) -> Figures:
    options = ("--widths", scale.flat_widths, "--rounds", scale.rounds)
    return programs("flat_gradients_speed.py", *options)


def flat_speed_rows(figures: Figures) -> Iterator[Row]:
    times = {name: median(ms) for name, ms in figures["ms"].items()}
    for name, ms in times.items():
        rate = figures["flops"] / ms / 1e9
        yield row(name, "rate, case 1", rate, "TFLOP/s", "measured")
        beside = times["cat"] / ms
        yield row(name, "rate beside cat's, case 1", beside, "", "measured")


# -- case 2 ---------------------------------------------------------------------------

RESIDUAL_ROUNDS = 3  # at least; a step takes seconds
FP32 = "fp32 without TF32"


def residual_peaks(scale: Scale, programs: Programs) -> Figures:
    return programs("residual_speed.py", "peaks", *scale.residual)


def residual_peaks_rows(figures: Figures) -> Iterator[Row]:
    for system, seen in figures.items():
        for quantity, key in (
            ("device, peak allocated", "allocated"),
            ("device, peak reserved", "reserved"),
            ("host", "host"),
        ):
            value = seen[key] / GIB
            yield row(system, f"case 2: {quantity}", value, "GiB", "measured")
    reserved = figures["offload residual"]["reserved"] / GIB
    yield from with_bar(
        "case 2: device, residual offloaded, peak reserved",
        reserved,
        bars.CASE2_DEVICE_GIB,
        "GiB",
    )


def residual_speed(scale: Scale, programs: Programs) -> Figures:
    rounds = max(scale.rounds // 3, RESIDUAL_ROUNDS)
    figures = programs("residual_speed.py", "speed", *scale.residual, rounds)
    return {"rows": scale.residual[1], **figures}


def residual_speed_rows(figures: Figures) -> Iterator[Row]:
    rows = f"{figures['rows']:,} rows"
    for system, ms in figures["ms"].items():
        yield row(system, f"case 2: step, {rows}", median(ms), "ms", "measured", FP32)
    for system, ratio in figures["ratio"].items():
        yield from with_bar(
            f"case 2: step time, {rows}, {system} beside {ratio['base']}",
            ratio["median"],
            bars.STEP_TIME,
            note=f"{spread(ratio)}; {FP32}",
        )
