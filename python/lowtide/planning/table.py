"""A plan on a terminal, and the progress of making it."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lowtide.phantom.clock import StepTime
from lowtide.planning.categories import CATEGORIES
from lowtide.planning.moments import MOMENTS
from lowtide.planning.ranks import RanksPlan
from lowtide.planning.report import Plan, Saving, gib

_NUMBERS = {
    *("rank", "bytes", "each", "share", "allocated", "reserved", "less"),
    *("total", "compute", "communication", "exposed", "other waits", "idle"),
}


@contextlib.contextmanager
def _progress(first: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr, gone when it is over."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first)
        yield lambda text: bar.update(task, description=text)


@contextlib.contextmanager
def progress(num_steps: int) -> Iterator[Callable[[int], None]]:
    with _progress("building the model") as say:
        yield lambda step: say(
            "evaluating" if step > num_steps else f"step {step} of {num_steps} done"
        )


@contextlib.contextmanager
def progress_of_ranks(num_ranks: int) -> Iterator[Callable[[], None]]:
    """Advanced as each rank is done."""
    done = itertools.count(1)
    with _progress(f"{num_ranks} ranks") as say:
        yield lambda: say(f"{next(done)} of {num_ranks} ranks done")


def show(plan: Plan, console: Console | None = None) -> None:
    (console or Console()).print(render(plan))


def render(plan: Plan) -> Group:
    parts: list[RenderableType] = [
        _verdict(plan),
        _categories(plan),
        _moments(plan),
        _largest(plan),
    ]
    if plan.savings:
        parts.append(_savings(plan))
    if plan.lowtide is not None:
        parts.append(_lowtide(plan))
    if plan.step_time is not None:
        parts.append(_step_time(plan.step_time))
    parts.append(Text("\n".join(_notes(plan)), style="dim"))
    return Group(*parts)


def show_ranks(planned: RanksPlan, console: Console | None = None) -> None:
    """Without divergences, which are errors."""
    title, plans = Text(), planned.plans
    if plans:
        first = next(iter(plans.values()))
        title.append(first.program, style="bold")
        title.append(f"  {len(plans)} of {first.world} ranks, {first.steps} steps")
    table = _table("", "rank", "reserved", "allocated", "fits")
    for rank, plan in plans.items():
        bound = plan.peak_reserved_bound
        more = f" (to {gib(bound)})" if bound > plan.peak_reserved else ""
        table.add_row(
            str(rank),
            gib(plan.peak_reserved) + more,
            gib(plan.peak_allocated),
            {None: "", True: "yes", False: "no"}[plan.fits],
        )
    style = "bold red" if planned.verdict.divergences else "bold green"
    notes = Text("\n".join(f"note: {n}" for n in planned.notes()), style="dim")
    parts = (title, table, Text(f"{planned.verdict}\n", style=style), notes)
    (console or Console()).print(Group(*parts))


def _verdict(plan: Plan) -> Text:
    text = Text()
    text.append(f"{plan.program}", style="bold")
    text.append(f"  rank {plan.rank} of {plan.world}, {plan.steps} steps\n")
    text.append("peak reserved ")
    text.append(gib(plan.peak_reserved), style="bold")
    if plan.peak_reserved_bound > plan.peak_reserved:
        text.append(f" (to {gib(plan.peak_reserved_bound)} on a device that lags)")
    text.append(", allocated ")
    text.append(gib(plan.peak_allocated), style="bold")
    text.append(f" (in {plan.peak_moment}, step {plan.peak_step}); fragmentation ")
    text.append(f"{gib(plan.fragmentation)}\n")
    if plan.communicators:
        names = ", ".join(f"{c.group} {gib(c.bytes)}" for c in plan.communicators)
        text.append(f"beside it NCCL's buffers, by arithmetic: {names}\n", style="dim")
    if plan.fits is not None and plan.device_memory is not None:
        size = gib(plan.device_memory)
        size += " less NCCL's buffers" if plan.communicators else ""
        if not plan.fits:
            text.append(f"does not fit into {size}", style="bold red")
        elif plan.retries:
            flushes = f"the cache is flushed {plan.retries} times"
            text.append(f"fits into {size}, but {flushes}", style="bold yellow")
        else:
            text.append(f"fits into {size}", style="bold green")
        text.append("\n")
    return text


class _Table(Table):
    """A table that shows texts as they are: a line of the program's may look like
    rich's markup."""

    def add_row(self, *cells: RenderableType | None, **settings: Any) -> None:
        texts = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*texts, **settings)


def _table(title: str, *columns: str) -> Table:
    table = _Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left")
    return table


def _categories(plan: Plan) -> Table:
    table = _table("At the peak of allocated memory", "bytes", "share", "", "what")
    for category, total in plan.by_category.items():
        share = total / plan.peak_allocated
        table.add_row(
            gib(total),
            f"{share:.0%}",
            category.replace("_", " "),
            Text(CATEGORIES[category], style="dim"),
        )
    return table


def _moments(plan: Plan) -> Table:
    table = _table("Peaks of the last step", "", "allocated", "reserved", "most of it")
    for name in MOMENTS:
        if name in plan.moments:
            moment = plan.moments[name]
            parts = sorted(moment.by_category.items(), key=lambda part: -part[1])[:4]
            most = ", ".join(f"{c.replace('_', ' ')} {gib(b)}" for c, b in parts)
            table.add_row(name, gib(moment.allocated), gib(moment.reserved), most)
    return table


def _largest(plan: Plan) -> Table:
    table = _table(
        "Largest tensors at the peak, alike ones in one row", "each", "", "what", "line"
    )
    for tensors in plan.largest:
        times = f"x {tensors.count}" if tensors.count > 1 else ""
        name = f"{tensors.category.replace('_', ' ')}\n{tensors.name or '-'}"
        where = f"{tensors.line}\n{tensors.code[:60]}" if tensors.line else "-"
        table.add_row(gib(tensors.bytes), times, name, where)
    return table


def _savings(plan: Plan) -> Table:
    table = _table("What would lower the peak", "less", "of", "how", "known by")
    for saving in plan.savings:
        of = "reserved" if saving.reserved is not None else "allocated"
        known = saving.basis
        if saving.by_run is not None:
            known += f"; a run: {gib(saving.by_run)}"
        table.add_row(gib(_bytes(saving)), of, saving.advice, known)
    return table


def _bytes(saving: Saving) -> int:
    return saving.allocated if saving.reserved is None else saving.reserved


def _lowtide(plan: Plan) -> Table:
    assert plan.lowtide is not None
    table = _table("lowtide's ledger", "", "peak", "planned")
    for name, row in plan.lowtide["categories"].items():
        table.add_row(name, gib(row["peak"]), gib(row["planned"]))
    return table


def _step_time(time: StepTime) -> Table:
    table = _table(
        f"Last step on {time.assumptions['accelerator']['name']}, ms, simulated",
        "",
        *("total", "compute", "communication", "exposed", "other waits", "idle"),
    )
    for name, usage in (*time.phases.items(), ("step", time.step)):
        parts = (usage.seconds, usage.compute, usage.communication, usage.exposed)
        cells = (*parts, usage.other_waits, usage.idle)
        table.add_row(name, *(f"{cell * 1e3:.1f}" for cell in cells))
    return table


def _notes(plan: Plan) -> Iterator[str]:
    yield from (f"note: {note}" for note in plan.notes)
    yield (
        f"simulated in {plan.seconds:.1f} s with {gib(plan.host_memory)} of host "
        "memory; CUDA's context and kernels come on top"
    )
