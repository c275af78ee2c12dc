"""A timeline for the eye: a Chrome trace, and a picture of the streams."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lowtide.phantom.dry.timekeeper import Span
from lowtide.phantom.machines import Accelerator

COMPUTE_STREAM = 0

_PHASES = -1  # the thread of the trace that shows them
_MICROSECONDS = 1e6
_VISIBLE = 1 / 2000  # of a picture's width
_COLOURS = {
    "kernel": "#4878a8",
    "transfer": "#8a6fb0",
    "collective": "#d98032",
    "exposed": "#c23b3b",
    "wait": "#e3e3e3",
}

Marks = list[tuple[str, float]]


class Timeline(Protocol):
    """What is asked of a ``lowtide.phantom.timeline`` that has ended."""

    accelerator: Accelerator

    def spans(self, begin: float, end: float) -> list[Span]: ...

    def assumptions(self) -> dict[str, Any]: ...


def write_chrome_trace(timeline: Timeline, path: str | Path, marks: Marks) -> None:
    """Trace Event Format: a thread for each stream, one for the phases."""
    begin, end = marks[0][1], marks[-1][1]
    spans = timeline.spans(begin, end)
    events: list[dict[str, Any]] = [
        _name_of_thread(stream, name) for stream, name in names_of(spans).items()
    ]
    events.append(_name_of_thread(_PHASES, "phases"))
    for (phase, start), (_, stop) in zip(marks, marks[1:], strict=False):
        events.append(_event(phase, "phase", _PHASES, start, stop))
    for span in spans:
        name = span.name or "wait for another stream"
        event = _event(name, span.kind, span.stream, span.begin, span.end)
        event["args"] = {
            "issued_us": round(span.issued * _MICROSECONDS, 3),
            "gflop": span.flops / 1e9,
            "mib": span.bytes / (1 << 20),
        }
        events.append(event)
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"kind": "simulated", **timeline.assumptions()},
    }
    Path(path).write_text(json.dumps(trace))


def names_of(spans: Sequence[Span]) -> dict[int, str]:
    """Streams by what they do for the longest time, the compute stream first."""
    times: dict[int, dict[str, float]] = {COMPUTE_STREAM: {}}
    for span in spans:
        busy = times.setdefault(span.stream, {})
        if span.kind != "wait":
            busy[span.name] = busy.get(span.name, 0) + span.end - span.begin
    names: dict[int, str] = {}
    for stream in sorted(times):
        most = max(times[stream], key=times[stream].__getitem__, default="waits")
        name = "compute" if stream == COMPUTE_STREAM else most
        others = sum(one.partition(" (")[0] == name for one in names.values())
        names[stream] = f"{name} ({others + 1})" if others else name
    return names


def _name_of_thread(thread: int, name: str) -> dict[str, Any]:
    return {
        **{"name": "thread_name", "ph": "M", "pid": 0, "tid": thread},
        "args": {"name": name},
    }


def _event(
    name: str, kind: str, thread: int, begin: float, end: float
) -> dict[str, Any]:
    return {
        **{"name": name, "cat": kind, "ph": "X", "pid": 0, "tid": thread},
        "ts": begin * _MICROSECONDS,
        "dur": (end - begin) * _MICROSECONDS,
    }


def draw(timeline: Timeline, path: str | Path, marks: Marks) -> None:
    from matplotlib.figure import Figure

    begin, end = marks[0][1], marks[-1][1]
    spans = timeline.spans(begin, end)
    exposed = [
        span for span in spans if span.kind == "wait" and span.stream == COMPUTE_STREAM
    ]
    rows = _rows(spans, (end - begin) * _VISIBLE)
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for row, stream in enumerate(rows):
        for kind, colour in _COLOURS.items():
            if kind in ("exposed", "wait"):
                continue
            bars = [
                ((span.begin - begin) * 1e3, (span.end - span.begin) * 1e3)
                for span in spans
                if span.stream == stream and span.kind == kind
            ]
            axes.broken_barh(bars, (row - 0.35, 0.7), color=colour, linewidth=0.4)
    waits = [((s.begin - begin) * 1e3, (s.end - s.begin) * 1e3) for s in exposed]
    axes.broken_barh(waits, (-0.35, 0.7), facecolors=_COLOURS["exposed"])
    _name_phases(axes, [(name, (at - begin) * 1e3) for name, at in marks])
    names = names_of(spans)
    axes.set_yticks(range(len(rows)), [names[stream] for stream in rows])
    axes.set_ylim(len(rows) - 0.5, -1)
    axes.set_xlim(0, (end - begin) * 1e3)
    axes.set_xlabel(f"ms, simulated on {timeline.accelerator.name}")
    _explain(figure)
    figure.savefig(path, dpi=120)


def _rows(spans: Sequence[Span], least: float) -> list[int]:
    """Streams that are busy for ``least`` seconds or more, the compute stream first."""
    busy = {COMPUTE_STREAM: least}
    for span in spans:
        if span.kind != "wait":
            busy[span.stream] = busy.get(span.stream, 0) + span.end - span.begin
    return sorted(stream for stream, seconds in busy.items() if seconds >= least)


def _name_phases(axes: Any, marks: Marks) -> None:
    """A name that has no room before the next one stands left of its line."""
    end = marks[-1][1]
    for (phase, begin), (_, next_begin) in zip(marks, marks[1:], strict=False):
        axes.axvline(begin, color="black", linewidth=0.6)
        fits = next_begin - begin > 0.01 * len(phase) * end
        text, side = (f" {phase}", "left") if fits else (f"{phase} ", "right")
        axes.text(begin, -0.62, text, fontsize=8, va="bottom", ha=side)


def _explain(figure: Any) -> None:
    from matplotlib.patches import Patch

    labels = {
        "kernel": "kernels",
        "transfer": "copies from and to the host",
        "collective": "collectives",
        "exposed": "the compute stream waits",
    }
    handles = [Patch(color=_COLOURS[k], label=text) for k, text in labels.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=8)
