"""torchtitan's trainer, unedited, under FSDP2 and under `lowtide run`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from case import Case, Row, rows_of
from foreign import foreign
from points import Figures, Points

from cases.published import PROGRAM, Published, of_table
from lowtide.phantom.dry.launch import Machine

NAME = "unedited_trainer"
GIB = 1 << 30
TIMEOUT = 1800.0  # seconds
DEFERRED = "deferred logits"
COMPILED = "--training.compile"
# What we set out to reach with deferred logits, of FSDP2's reserved.
BARS = {8: 0.65, 128: 0.60}
POINTS = {
    f"{ranks} ranks{', compiled' if arguments else ''}": of_table(
        "", 0.0, ranks, arguments
    )
    for ranks in BARS
    for arguments in ("", COMPILED)
}
FSDP2, PLAIN, DEFER = ("fsdp2",), ("lowtide",), ("lowtide", "--defer-logits")


class _Runs(Points):
    def __init__(self, figure: Published) -> None:
        super().__init__("unedited.py", timeout=TIMEOUT)
        self._figure = figure

    def of(self, system: Sequence[str]) -> Figures:
        (figures,) = self.each([(*system, PROGRAM, *self._figure.arguments)])
        return figures

    def _machine(self, arguments: Sequence[str]) -> Machine:
        of = self._figure
        return Machine(gpu=of.gpu, world=of.ranks, memory=of.memory)


def rows_at(point: str) -> list[Row]:
    foreign("packages")
    figure, row = POINTS[point], rows_of(NAME)
    assert figure.ranks is not None
    runs = _Runs(figure)
    theirs, plain, deferred = (
        runs.of(system)["steady"] for system in (FSDP2, PLAIN, DEFER)
    )
    where = f"torchtitan's trainer, 8B, {point}"
    result = []
    for ours, loss in ((plain, "same loss"), (deferred, DEFERRED)):
        what = f"reserved, {where}, {loss}"
        for system, value in (("lowtide", ours), ("fsdp2", theirs)):
            gib = round(value / GIB, 2)
            result.append(row(system, what, gib, "GiB", "simulated"))
        what = f"of FSDP2's {what}"
        share = round(ours / theirs, 3)
        result.append(row("lowtide", what, share, "", "arithmetic"))
        if loss == DEFERRED:
            bar = BARS[figure.ranks]
            result.append(row("bar", what, bar, "", "arithmetic"))
    return result


def measure() -> list[Row]:
    return [row for point in POINTS for row in rows_at(point)]


CASE = Case(
    name=NAME,
    describe="torchtitan's trainer on Llama 3 8B, unedited: `lowtide run` and FSDP2.",
    how="""\
The run that published has as *batch 2*: torchtitan at 9dec370, two sequences of 8,192
tokens a rank, selective checkpointing, loss over whole logits outside of the model's
forward, on the [driver that computes nothing](design/phantom.md), with torch's own
segments; the peak that the trainer logs for its last ten of twenty steps. *same loss*:
under `python -m lowtide run`, with the bits of FSDP2. *deferred logits*: under
`python -m lowtide run --defer-logits`; the loss is `linear_cross_entropy`'s, and a step
that made logits would end the run. *bar*: what we set out to reach.

What is left, by `lowtide plan` of the same runs with deferred logits. Allocated at the
peak, which is in a block's backward: 48.2 GiB at 8 ranks, of which 30.9 are activations
that selective checkpointing keeps, 11.8 shards, gradients and the optimizer's state;
37.5 GiB at 128, of which 30.9 and 0.8. Compiled: 43.1 at 8 ranks, of which 27.1 are
activations. Reserved is 5.2, 2.3 and 3.7 GiB more. Expandable segments would leave 0.8,
0.4 and 0.8 of that: replayed before the driver had a GPU's order of addresses, which
changed 53.02 and 39.92 GiB reserved to the 53.4 and 39.8 here.

One H200 has run the same trainer in a later version, torchtitan 0.2.2, whose compiled
loss makes no fp32 logits, so that the compiled bar is missed there:
[trainer-eager and trainer-compiled](gpu_check.md#trainer-eager).

Clone and packages are looked for in the folder that `LOWTIDE_FOREIGN` names, as for
published.
""",
    run=measure,
    parts={point: partial(rows_at, point) for point in POINTS},
    only_by_name="wants a clone of another repository",
)
