"""What the names of a model's regions came to, for ``memory_report``."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide._activation.regions import (
    RegionState,
    names_in_graphs,
    problems,
    regions,
    transfers_in_use,
)


@dataclasses.dataclass(frozen=True)
class NameReport:
    """One name, summed over the model's regions, since the last reset. Counts are of
    values, bytes of their storages."""

    treatment: str  # "save", "offload", "recompute"; several are joined by "/"
    matched: int
    kept: int
    kept_bytes: int
    moved: int
    moved_bytes: int
    shared: int  # bytes counted under another name, or by another region
    recomputed: int
    in_graph: int  # of regions inside compiled graphs: values in the latest graph
    skipped: dict[str, int]  # reason -> values
    host_live: int  # bytes, now
    host_peak: int
    device_live: int  # bytes copied back, now
    device_peak: int


@dataclasses.dataclass(frozen=True)
class ActivationReport:
    """What all regions that offload on this device hold; several models share the
    bytes."""

    num_regions: int
    names: dict[str, NameReport]
    problems: list[str]  # names that came to nothing so far
    host_live: int
    host_peak: int
    device_peak: int  # bytes of offloaded values on the device at once
    peak_moment: str  # "forward of layers.3"; empty if nothing was offloaded
    leaving_peak: int  # bytes on their way out at once
    fetched_ahead: int  # values whose copy back was issued a region ahead
    fetched_inline: int  # values whose copy back had to be waited for
    # Seconds in which compute stood still for copies, as far as the device has come: on
    # a CPU the time they took, elsewhere between time stamps of the device, simulated
    # ones if its time is. None on a device without time.
    exposed_wait: float | None
    pinned_bytes: int  # registered, in use or not
    pinned_cap: int
    registration_seconds: float  # once, in the first steps
    pageable_peak: int  # bytes beyond the cap, whose copies block the host


_COUNTS = ("matched", "kept", "kept_bytes", "moved", "moved_bytes", "shared")


def activation_report(model: nn.Module) -> ActivationReport | None:
    """None if no module of ``model`` is checkpointed by lowtide."""
    states = [state for _, state in regions(model)]
    if not states:
        return None
    used = transfers_in_use(states)
    host = used.host_ledger if used else None
    device = used.device_ledger if used else None
    figures = used.figures() if used else {}
    pool = used.pool_figures() if used else {}
    return ActivationReport(
        num_regions=len(states),
        names=dict(_names(states, host, device)),
        problems=problems(model),
        host_live=host.total_live if host else 0,
        host_peak=host.total_peak if host else 0,
        device_peak=figures.get("device_peak", 0),
        peak_moment=figures.get("peak_moment", ""),
        leaving_peak=figures.get("leaving_peak", 0),
        fetched_ahead=figures.get("fetched_ahead", 0),
        fetched_inline=figures.get("fetched_inline", 0),
        exposed_wait=_exposed_wait(used.device, figures) if used else 0.0,
        pinned_bytes=pool.get("pinned_bytes", 0),
        pinned_cap=pool.get("cap_bytes", 0),
        registration_seconds=pool.get("registration_ns", 0) / 1e9,
        pageable_peak=pool.get("peak_pageable_bytes", 0),
    )


def _exposed_wait(device: torch.device, figures: dict[str, Any]) -> float | None:
    if device.type == "cpu":
        return float(figures["host_ns_copying"]) / 1e9
    exposed = figures["exposed_ns"]
    return None if exposed is None or not _keeps_time() else float(exposed) / 1e9


def _keeps_time() -> bool:
    """GPUs that compute nothing (lowtide.phantom) do only while a timeline runs."""
    keeps = getattr(ctypes.CDLL(None), "lowtide_dry_keeps_time", None)
    return keeps is None or bool(keeps())


def planned_bytes(model: nn.Module) -> int:
    """Bytes of the buffers that values are copied back to: those of the region in use
    and of the ``prefetch`` ones before it. 0 before the first forward."""
    peak = 0
    for _, state in regions(model):
        calls = max(state.region.num_calls, 1)
        figures = state.region.figures().values()
        moved = sum(each["moved_bytes"] for each in figures) // calls
        peak = max(peak, (1 + state.policy.prefetch) * moved)
    return peak


def reset(model: nn.Module) -> None:
    """Counts and peaks start again from what is live now."""
    states = [state for _, state in regions(model)]
    for state in states:
        state.region.reset_figures()
    if used := transfers_in_use(states):
        used.reset_figures()
        used.host_ledger.reset_peaks()


def _names(
    states: list[RegionState], host: Any, device: Any
) -> Iterator[tuple[str, NameReport]]:
    on_host = host.by_name("activations") if host else {}
    on_device = device.by_name("activations") if device else {}
    treatments: dict[str, dict[str, None]] = {}
    in_graphs = [names_in_graphs.get(p, {}) for p in {s.policy for s in states}]
    for state in states:
        for name, one in state.policy.treatments().items():
            treatments.setdefault(name, {})[one] = None
    figures = [state.region.figures() for state in states]
    for name, several in treatments.items():
        mine = [each[name] for each in figures if name in each]
        skipped: dict[str, int] = {}
        for each in mine:
            for reason, count in each["skipped"].items():
                skipped[reason] = skipped.get(reason, 0) + count
        counts = {key: sum(each[key] for each in mine) for key in _COUNTS}
        yield (
            name,
            NameReport(
                treatment="/".join(several),
                **counts,
                recomputed=sum(each["recomputed"] for each in mine),
                in_graph=sum(each.get(name, 0) for each in in_graphs),
                skipped=skipped,
                host_live=on_host.get(name, (0, 0))[0],
                host_peak=on_host.get(name, (0, 0))[1],
                device_live=on_device.get(name, (0, 0))[0],
                device_peak=on_device.get(name, (0, 0))[1],
            ),
        )


def lines(report: ActivationReport, human: Callable[[int], str]) -> Iterable[str]:
    yield f"activations of {report.num_regions} checkpointed modules"
    yield (
        f"{'name':<18}{'policy':>12}{'matched':>9}{'kept':>12}{'moved':>12}"
        f"{'host peak':>12}{'back, peak':>12}"
    )
    for name, row in report.names.items():
        yield (
            f"{name:<18}{row.treatment:>12}{row.matched:>9}{human(row.kept_bytes):>12}"
            f"{human(row.moved_bytes):>12}{human(row.host_peak):>12}"
            f"{human(row.device_peak):>12}"
        )
        if row.in_graph:
            yield f"  in the latest compiled graph: {row.in_graph} values"
        for reason, count in row.skipped.items():
            yield f"  skipped {count}: {reason}"
    for problem in report.problems:
        yield f"  problem: {problem}"
    if not report.peak_moment:
        return
    yield (
        f"offloaded values on the device: at most {human(report.device_peak)}, in "
        f"{report.peak_moment}; leaving at once: at most {human(report.leaving_peak)}"
    )
    yield (
        f"copied back: {report.fetched_ahead} values ahead, {report.fetched_inline} "
        f"waited for; exposed wait: {_seconds(report.exposed_wait)}"
    )
    yield (
        f"host: {human(report.host_live)} live, {human(report.host_peak)} peak; "
        f"page-locked {human(report.pinned_bytes)} of at most "
        f"{human(report.pinned_cap)}, registered once in "
        f"{_seconds(report.registration_seconds)}; pageable peak "
        f"{human(report.pageable_peak)}"
    )


def _seconds(value: float | None) -> str:
    return "not measured on this device" if value is None else f"{value * 1e3:.1f} ms"
