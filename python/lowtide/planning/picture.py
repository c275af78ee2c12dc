"""Bytes over the last step, by category."""

import base64
import io
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from lowtide.planning.report import Plan

_GIB = 1 << 30


def draw(plan: Plan, path: str | Path) -> None:
    """Writes PNG, SVG or a page of HTML, as the name of the file says."""
    figure = picture(plan)
    kind = Path(path).suffix[1:]
    if kind != "html":
        figure.savefig(path, format=kind, dpi=150)
        return
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    data = base64.b64encode(image.getvalue()).decode()
    Path(path).write_text(
        f"<!doctype html><meta charset=utf-8><title>{plan.program}</title>"
        f'<img style="max-width:100%" src="data:image/png;base64,{data}" '
        f'alt="memory over one step">\n'
    )


def picture(plan: Plan) -> Figure:
    timeline = plan.timeline
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(timeline.reserved))
    layers = [[b / _GIB for b in line] for line in timeline.allocated.values()]
    colors = matplotlib.colormaps["tab20"].colors[: len(layers)]
    names = [name.replace("_", " ") for name in timeline.allocated]
    axes.stackplot(places, layers, labels=names, colors=colors, step="post", lw=0)
    reserved = [b / _GIB for b in timeline.reserved]
    axes.plot(places, reserved, color="black", lw=1, label="reserved")
    if plan.device_memory and plan.device_memory < 1.5 * plan.peak_reserved:
        limit = plan.device_memory / _GIB
        axes.axhline(limit, color="red", ls="--", lw=1, label="device")
    begin = 0
    for moment, samples in groupby(timeline.moments):
        end = begin + len(list(samples))
        if end - begin > len(timeline.moments) / 30:
            axes.annotate(
                moment,
                ((begin + end) / 2 / len(timeline.moments), 0.99),
                xycoords="axes fraction",
                ha="center",
                va="top",
            )
        begin = end
    events = timeline.events_per_sample
    unit = "allocator call" if events == 1 else f"{events} allocator calls"
    axes.set(
        xlabel=f"last step, one sample for each {unit}",
        ylabel="GiB",
        title=f"{plan.program}, rank {plan.rank} of {plan.world} (simulated)",
        xlim=(0, max(len(timeline.moments) - 1, 1)),
    )
    figure.legend(loc="outside right upper", fontsize="small", reverse=True)
    return figure
