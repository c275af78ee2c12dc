"""The measurements of gpu_check: which programs run, and what their figures say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import bars
from bars import row, with_bar
from case import Row
from launch import run
from scale import Scale

GIB = 1 << 30
HERE = Path(__file__).resolve().parent
FLAGS: dict[str, tuple[str, ...]] = {"default": (), "expandable": ("--expandable",)}
CHECKPOINTS = ("full", "selective", "none")
LIMIT = 540  # seconds of one program, below what may end the whole command

Figures = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """A step: ``measure`` gives figures that JSON can keep, ``rows`` reads them."""

    name: str
    what: str
    seconds: int
    scale: Scale
    measure: Callable[[Scale], Figures]
    rows: Callable[[Figures], Iterator[Row]]

    def run(self) -> Figures:
        return self.measure(self.scale)


def program(name: str, *arguments: object) -> Any:
    """What a program of this folder or of ../programs prints."""
    path = HERE / name
    where = str(path) if path.exists() else name
    printed = run(where, *map(str, arguments), gpu=True, timeout=LIMIT)
    return json.loads(printed.splitlines()[-1])


def together(calls: Sequence[Sequence[object]]) -> list[Any]:
    """Two at a time: programs that measure bytes do not disturb each other as long as
    the device holds both."""
    with ThreadPoolExecutor(max_workers=2) as threads:
        return list(threads.map(lambda call: program(*map(str, call)), calls))


# -- peak memory of the slice -----------------------------------------------------

# like for like, and with the loss that lowtide would take
LLAMA_SYSTEMS = ("fsdp2", "lowtide", "lowtide, vocabulary loss")


def llama_memory(checkpoint: str, scale: Scale) -> Figures:
    keys, calls = [], []
    for segments in scale.segments:
        for system in LLAMA_SYSTEMS:
            loss = "vocabulary" if "vocabulary" in system else scale.llama_loss
            keys.append((segments, system))
            calls.append(
                (
                    *("llama_memory.py", "--device", "cuda", *scale.llama),
                    *("--system", system.split(",")[0], "--loss", loss),
                    *("--checkpoint", checkpoint, *FLAGS[segments]),
                )
            )
    figures: Figures = {segments: {} for segments in scale.segments}
    for (segments, system), seen in zip(keys, together(calls), strict=True):
        figures[segments][system] = steady(seen)
    return figures


def steady(seen: Figures) -> Figures:
    """Raises if the allocator had to give memory back, which lowers its peak."""
    if seen["retries"]:
        raise RuntimeError(
            f"llama_memory.py: expected a device that holds all, got {seen['retries']} "
            "allocations that had to be tried again. Is another program on this GPU?"
        )
    return seen["steady"]


def llama_memory_rows(checkpoint: str, figures: Figures) -> Iterator[Row]:
    for segments, seen in figures.items():
        setting = f"slice of 8B, 8 ranks, checkpoint {checkpoint}, {segments} segments"
        for kind in ("reserved", "allocated"):
            for system in LLAMA_SYSTEMS:
                value = seen[system][kind] / GIB
                yield row(system, f"{kind}, {setting}", value, "GiB", "measured")
        ours, theirs = seen["lowtide"], seen["fsdp2"]
        share = ours["reserved"] / theirs["reserved"]
        yield from with_bar(
            f"of FSDP2's reserved, {setting}", share, bars.OF_FSDP2_RESERVED
        )
        slack = ours["reserved"] / ours["allocated"]
        yield from with_bar(
            f"reserved / allocated, {setting}", slack, bars.RESERVED_OF_ALLOCATED
        )


# -- bits -----------------------------------------------------------------------------


def bits(scale: Scale) -> Figures:
    return program("bits.py", *scale.compared, "--loss", scale.llama_loss)


def bits_rows(figures: Figures) -> Iterator[Row]:
    for variant, seen in figures["beside FSDP2"].items():
        for what, count in seen.items():
            quantity = f"{what} whose bits differ from FSDP2's, {variant}"
            yield from with_bar(quantity, count, bars.NONE)
    errors = figures["gradient errors"]
    for mode, error in errors.items():
        yield row(mode, "error of a weight's gradient in bf16", error, "", "measured")
    beside = errors["fused"] / errors["exact"] if errors["exact"] else float("inf")
    quantity = "error of a fused gradient beside the exact mode's"
    yield from with_bar(quantity, beside, bars.NO_WORSE)


# -- step time of the slice ---------------------------------------------------------


def llama_speed(scale: Scale) -> Figures:
    options = ("--rounds", scale.rounds)
    return program("llama_speed.py", *scale.llama, "--loss", scale.llama_loss, *options)


def llama_speed_rows(figures: Figures) -> Iterator[Row]:
    setting = "slice of 8B, one rank, NCCL"
    for system, ms in figures["ms"].items():
        yield row(system, f"step, {setting}", median(ms), "ms", "measured")
        rate = figures["flops"] / median(ms) / 1e9
        yield row(system, f"rate, {setting}", rate, "TFLOP/s", "measured")
    ratio = figures["ratio"]
    yield from with_bar(
        f"step time beside FSDP2's, {setting}",
        ratio["median"],
        bars.STEP_TIME,
        note=spread(ratio),
    )


def spread(ratio: Figures) -> str:
    return f"half of the rounds between {ratio['low']:.3f} and {ratio['high']:.3f}"


# -- case 1 -------------------------------------------------------------------------

FLAT_SYSTEMS = ("per_parameter", "cat", "flat", "lowtide", "fused")


def flat_gradients(scale: Scale) -> Figures:
    widths = ("--widths", scale.flat_widths)
    speed = program("flat_gradients_speed.py", *widths, "--rounds", scale.rounds)
    keys = [(segments, name) for segments in scale.segments for name in FLAT_SYSTEMS]
    seen = together(
        [
            (
                *("flat_gradients_reserved.py", name, "--device", "cuda", *widths),
                *FLAGS[segments],
            )
            for segments, name in keys
        ]
    )
    peaks: Figures = {segments: {} for segments in scale.segments}
    for (segments, name), figures in zip(keys, seen, strict=True):
        peaks[segments][name] = figures
    return {"speed": speed, "peaks": peaks}


def flat_gradients_rows(figures: Figures) -> Iterator[Row]:
    """``flat`` of the bar is lowtide's slab; *flat* is the one in plain torch."""
    for segments, seen in figures["peaks"].items():
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
    times = {name: median(ms) for name, ms in figures["speed"]["ms"].items()}
    for name, ms in times.items():
        rate = figures["speed"]["flops"] / ms / 1e9
        yield row(name, "rate, case 1", rate, "TFLOP/s", "measured")
        beside = times["cat"] / ms
        yield row(name, "rate beside cat's, case 1", beside, "", "measured")


# -- case 2 -------------------------------------------------------------------------

RESIDUAL_SYSTEMS = ("nothing named", "offload residual", "offload both")


def residual(scale: Scale) -> Figures:
    layers, rows, width = scale.residual
    specs = [f"{system}:{layers}:{rows}:1" for system in RESIDUAL_SYSTEMS]
    peaks = program("residual_full_scale.py", "cuda", 8, width, *specs)
    rounds = max(scale.rounds // 3, 2)
    return {
        "peaks": dict(zip(RESIDUAL_SYSTEMS, peaks, strict=True)),
        "speed": program("residual_speed.py", layers, rows, width, rounds),
    }


def residual_rows(figures: Figures) -> Iterator[Row]:
    for system, seen in figures["peaks"].items():
        for quantity, key in (
            ("device, peak allocated", "allocated"),
            ("device, peak reserved", "reserved"),
            ("host", "host"),
        ):
            value = seen[key] / GIB
            yield row(system, f"case 2: {quantity}", value, "GiB", "measured")
    reserved = figures["peaks"]["offload residual"]["reserved"] / GIB
    yield from with_bar(
        "case 2: device, residual offloaded, peak reserved",
        reserved,
        bars.CASE2_DEVICE_GIB,
        "GiB",
    )
    for system, ms in figures["speed"]["ms"].items():
        yield row(system, "case 2: step", median(ms), "ms", "measured")
    for system, ratio in figures["speed"]["ratio"].items():
        if system.startswith("offload"):
            yield from with_bar(
                f"case 2: step time beside no offload, {system}",
                ratio["median"],
                bars.STEP_TIME,
                note=spread(ratio),
            )


# -- links, kernels, host -----------------------------------------------------------

DIRECTIONS = {"h2d": "to the device", "d2h": "to the host", "both": "both at once"}


def links(scale: Scale) -> Figures:
    return program("links.py", scale.link_bytes, scale.rounds)


def links_rows(figures: Figures) -> Iterator[Row]:
    for key, direction in DIRECTIONS.items():
        yield row("link", f"link, {direction}", figures[key], "GB/s", "measured")


def kernels(scale: Scale) -> Figures:
    return program("kernels.py", scale.kernel_elements, scale.rounds)


def kernels_rows(figures: Figures) -> Iterator[Row]:
    for name, rate in figures.items():
        system = "copy" if name == "copy" else "lowtide"
        yield row(system, f"kernel: {name}", rate, "GB/s", "measured")
        if name != "copy":
            share = rate / figures["copy"]
            yield row("lowtide", f"kernel beside copy: {name}", share, "", "measured")


def host_units(scale: Scale) -> Figures:
    return program("host_units.py", scale.host_layers, scale.host_steps)


def host_units_rows(figures: Figures) -> Iterator[Row]:
    plain = sum(figures["plain"].values())
    added = {}
    for system in ("lowtide", "fsdp2"):
        added[system] = sum(figures[system].values()) - plain
        yield row(system, "host time per unit", added[system], "us", "measured")
        for phase, value in figures[system].items():
            more = value - figures["plain"][phase]
            yield row(system, f"host time per unit, {phase}", more, "us", "measured")
    yield row("plain", "host time of an unsharded block", plain, "us", "measured")


# -- the allocator model ------------------------------------------------------------


def replay(scale: Scale) -> Figures:
    figures = {}
    for segments in scale.segments:
        options = (*scale.replayed, "--loss", scale.llama_loss, *FLAGS[segments])
        figures[segments] = {
            "cuda": program("allocator_replay.py", *options),
            "simulated": program("llama_memory.py", *options)["steady"],
        }
    return figures


def replay_rows(figures: Figures) -> Iterator[Row]:
    for segments, both in figures.items():
        seen, simulated = both["cuda"], both["simulated"]
        setting = f"replay, {segments} segments"
        calls = seen["calls observed"]
        yield row("lowtide", f"{setting}: calls compared", calls, "", "measured")
        for key in (
            "differences in the history",
            "differences in allocated",
            "differences in reserved",
        ):
            yield from with_bar(f"{setting}: {key}", seen[key], bars.NONE)
        for kind in ("allocated", "reserved"):
            quantity = f"{setting}: peak {kind}"
            for system, value in (
                ("CUDA", seen["cuda"][kind]),
                ("model, asked the same", seen["model"][kind]),
                ("simulated step", simulated[kind]),
            ):
                how = "measured" if system == "CUDA" else "simulated"
                yield row(system, quantity, value / GIB, "GiB", how)
        for key, value in seen["ledger"].items():
            yield row("lowtide", f"{setting}: {key}", value / GIB, "GiB", "measured")
