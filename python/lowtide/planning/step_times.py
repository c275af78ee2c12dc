"""How long the last step of a recorded program takes, by moment."""

from lowtide.phantom.clock import StepTime, timeline
from lowtide.phantom.dry import timekeeper
from lowtide.phantom.streams import write_chrome_trace
from lowtide.planning.analysis import Analysis


def of_last_step(analysis: Analysis, clock: timeline, trace: str | None) -> StepTime:
    """A moment begins with its first allocation. Writes a Chrome trace to ``trace``."""
    marks = _marks_of_last_step(analysis)
    if trace is not None:
        write_chrome_trace(clock, trace, marks)
    return clock.report_of(marks)


def _marks_of_last_step(analysis: Analysis) -> list[tuple[str, float]]:
    recorder = analysis.recorder
    first_step = len(recorder.step_ends) == 1
    begin = 0 if first_step else recorder.step_ends[-2]
    found: list[tuple[str, int]] = []
    for life in analysis.lives[begin : recorder.step_ends[-1]]:
        if not found or found[-1][0] != life.moment:
            found.append((life.moment, life.recorded.time))
    if not first_step and found:
        found[0] = (found[0][0], recorder.step_times[-2])
    found.append(("end", recorder.step_times[-1]))
    return [(name, timekeeper.time_of(moment)) for name, moment in found]
