"""How long the last step of a recorded program takes, by moment."""

from lowtide.phantom import timeline
from lowtide.phantom.clock import StepTime
from lowtide.phantom.streams import write_chrome_trace
from lowtide.planning.analysis import Analysis


def of_last_step(
    analysis: Analysis, clock: timeline, trace: str | None, notes: list[str]
) -> StepTime:
    """A moment begins with its first allocation. Writes a Chrome trace to ``trace``."""
    marks = _marks_of_last_step(analysis)
    if trace is not None:
        write_chrome_trace(clock, trace, marks)
    if any("DDP" in note for note in notes):
        notes.append("DDP's all-reduces are not on the timeline")
    return clock.report_of(marks)


def _marks_of_last_step(analysis: Analysis) -> list[tuple[str, float]]:
    recorder = analysis.recorder
    first_step = len(recorder.step_ends) == 1
    begin = 0 if first_step else recorder.step_ends[-2]
    marks: list[tuple[str, float]] = []
    for life in analysis.lives[begin : recorder.step_ends[-1]]:
        if not marks or marks[-1][0] != life.moment:
            marks.append((life.moment, life.recorded.time))
    if not first_step and marks:
        marks[0] = (marks[0][0], recorder.step_times[-2])
    return [*marks, ("end", recorder.step_times[-1])]
