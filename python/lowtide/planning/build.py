"""Puts a :class:`Plan` together from the analysis of a recording."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowtide.memory import memory_report
from lowtide.phantom.clock import StepTime
from lowtide.phantom.nccl_buffers import Communicator
from lowtide.planning.analysis import Analysis, Life
from lowtide.planning.categories import CATEGORIES
from lowtide.planning.history import Replayed
from lowtide.planning.moments import MOMENTS
from lowtide.planning.report import Moment, Plan, Tensors, Timeline
from lowtide.planning.savings import savings_of

_MAX_SAMPLES = 1500


def build_plan(
    analysis: Analysis,
    *,
    program: str,
    world: int,
    rank: int,
    device_memory: int | None,
    step_time: StepTime | None,
    pinned: int | None,
    communicators: list[Communicator],
    notes: list[str],
    seconds: float,
) -> Plan:
    peak = analysis.peak()
    live = analysis.live_at(peak)
    steps = analysis.steps()
    fits, retries = _fits(analysis, device_memory, sum(c.bytes for c in communicators))
    settings = analysis.history.settings
    return Plan(
        program=program,
        world=world,
        rank=rank,
        steps=len(steps),
        allocator=dataclasses.asdict(settings),
        device_memory=device_memory,
        peak_allocated=analysis.allocated[peak],
        peak_reserved=max(analysis.reserved),
        peak_reserved_bound=_late(analysis).reserved,
        reserved_at_peak=analysis.reserved[peak],
        peak_moment=analysis.moment_at(peak),
        peak_step=next(
            (n for n, step in enumerate(steps, 1) if peak in step), len(steps) + 1
        ),
        by_category=_by_category(live),
        moments=_moments(analysis, steps[-1]),
        largest=_largest(live),
        fits=fits,
        retries=retries,
        savings=savings_of(analysis, world, step_time),
        lowtide=_lowtide_report(analysis),
        timeline=_timeline(analysis, steps[-1]),
        step_time=step_time,
        pinned=pinned,
        communicators=communicators,
        notes=notes,
        seconds=seconds,
        host_memory=most_resident(),
    )


def most_resident() -> int:
    """Bytes, of this process: getrusage's begin with those of who started it."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(kib) << 10


def _fits(
    analysis: Analysis, device_memory: int | None, nccl_buffers: int
) -> tuple[bool | None, int]:
    if device_memory is None:
        return None, 0
    left = max(1, device_memory - nccl_buffers)
    found = analysis.history.replay(analysis.history.settings, left)
    return found.fits, found.retries


def _late(analysis: Analysis) -> Replayed:
    """What the allocator makes of a host that is always ahead of the device."""
    settings = dataclasses.replace(analysis.history.settings, events="at_sync")
    return analysis.history.replay(settings, None)


def _by_category(lives: Iterable[Life]) -> dict[str, int]:
    result = dict.fromkeys(CATEGORIES, 0)
    for life in lives:
        result[life.category] += life.block
    return {category: total for category, total in result.items() if total}


def _moments(analysis: Analysis, step: range) -> dict[str, Moment]:
    places: dict[str, list[int]] = {moment: [] for moment in MOMENTS}
    moments = _moment_of_each(analysis, step)
    for place, moment in zip(step, moments, strict=True):
        places[moment].append(place)
    result = {}
    for moment, within in places.items():
        if within:
            worst = max(within, key=lambda place: analysis.allocated[place])
            result[moment] = Moment(
                allocated=analysis.allocated[worst],
                reserved=max(analysis.reserved[place] for place in within),
                by_category=_by_category(analysis.live_at(worst)),
            )
    return result


def _moment_of_each(analysis: Analysis, step: range) -> list[str]:
    begins = {life.begin: life.moment for life in analysis.lives}
    moment = "forward"
    result = []
    for place in step:
        moment = begins.get(place, moment)
        result.append(moment)
    return result


# -- the largest tensors -------------------------------------------------------------


def _largest(live: Iterable[Life]) -> list[Tensors]:
    alike: dict[tuple[Any, ...], list[Life]] = {}
    for life in live:
        place = re.sub(r"\d+", "*", life.name or life.module or "")
        key = (life.block, life.category, place, life.line, life.recorded.operator)
        alike.setdefault(key, []).append(life)
    groups = [_tensors(lives) for lives in alike.values()]
    return sorted(groups, key=lambda tensors: -tensors.total)[:10]


def _tensors(lives: list[Life]) -> Tensors:
    first = lives[0]
    names = {life.name or life.module or "" for life in lives}
    name = names.pop() if len(names) == 1 else _common(names)
    return Tensors(
        bytes=first.block,
        count=len(lives),
        category=first.category,
        name=name,
        operator=first.recorded.operator,
        moment=first.moment,
        line=first.line,
        code=first.code,
    )


def _common(names: set[str]) -> str:
    return re.sub(r"\d+", "*", next(iter(names)))


# -- over time -----------------------------------------------------------------------


def _timeline(analysis: Analysis, step: range) -> Timeline:
    per_sample = max(1, -(-len(step) // _MAX_SAMPLES))
    samples = [
        max(step[i : i + per_sample], key=lambda place: analysis.allocated[place])
        for i in range(0, len(step), per_sample)
    ]
    moments = _moment_of_each(analysis, step)
    allocated = {category: [0] * len(samples) for category in CATEGORIES}
    change: dict[int, list[tuple[str, int]]] = {}
    for life in analysis.lives:
        if life.end > step.start and life.begin < step.stop:
            change.setdefault(life.begin, []).append((life.category, life.block))
            change.setdefault(life.end, []).append((life.category, -life.block))
    now = dict.fromkeys(CATEGORIES, 0)
    events = iter(sorted(change))
    event = next(events, None)
    for number, place in enumerate(samples):
        while event is not None and event <= place:
            for category, num_bytes in change[event]:
                now[category] += num_bytes
            event = next(events, None)
        for category, total in now.items():
            allocated[category][number] = total
    return Timeline(
        events_per_sample=per_sample,
        allocated={name: line for name, line in allocated.items() if any(line)},
        reserved=[analysis.reserved[place] for place in samples],
        moments=[moments[place - step.start] for place in samples],
    )


def _lowtide_report(analysis: Analysis) -> dict[str, Any] | None:
    for root in analysis.recorder.modules.roots:
        try:
            return memory_report(root).to_dict()
        except ValueError:  # not sharded by lowtide
            continue
    return None
