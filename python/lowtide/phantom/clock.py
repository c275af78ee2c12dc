"""The time a program would take: what the phantom device does, on a timeline."""

import dataclasses
import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lowtide.phantom import machines, streams
from lowtide.phantom.dry import timekeeper, triton_work
from lowtide.phantom.dry.timekeeper import Span
from lowtide.phantom.machines import Accelerator, Host, Network

_started = 0  # timelines of this process; the driver keeps the last one


@dataclass(frozen=True)
class Usage:
    """Simulated seconds of a stretch of the compute stream.

    ``seconds`` = ``compute`` + ``exposed`` + ``other_waits`` + ``idle``.
    """

    seconds: float
    compute: float  # the compute stream runs kernels or copies
    other_kernels: float  # another stream does
    communication: float  # a collective runs, on whatever stream
    # A collective runs while the compute stream waits for another stream, or on it.
    exposed: float
    other_waits: float  # the compute stream waits and no collective runs
    idle: float  # the compute stream has nothing to do: the host is late

    def __add__(self, other: "Usage") -> "Usage":
        both = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Usage(*(a + b for a, b in both))


@dataclass(frozen=True)
class StepTime:
    """One step; nothing of it is measured."""

    step: Usage
    phases: dict[str, Usage]  # in the order in which they first began
    collectives: dict[str, int]  # how many of each kind
    collective_bytes: dict[str, float]  # their buffers', the larger side's, by kind
    assumptions: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        columns = ("seconds", "compute", "communication", "exposed", "idle")
        rows: list[tuple[str, ...]] = [("simulated, ms", *columns)]
        for name, usage in (*self.phases.items(), ("step", self.step)):
            values = [f"{getattr(usage, column) * 1e3:.2f}" for column in columns]
            rows.append((name, *values))
        return "\n".join("".join(f"{cell:<15}" for cell in row) for row in rows)


class timeline:
    """Keeps time on the phantom GPU in a ``with`` block.

    Every kernel that is launched takes its place on its stream: the longer of its FLOPs
    and its bytes over the accelerator's figures. Collectives take what NCCL's tuning
    model says and multiprocessors from the kernels beside them. docs/time.md has all
    that is assumed.

        with lowtide.phantom.timeline() as time:
            for _ in range(3):
                time.begin_step()
                time.phase("forward")
                ...
        print(time.report())

    Args:
        accelerator: Figures of another one than the GPU that the process sees, or the
            name of one, such as ``"h200"``.
        network: Links and protocols; a machine with such GPUs if not given.
        ranks_per_node: Instead of the network's.
        host: Seconds that calls cost the host; its Python between them is not counted.

    Raises:
        RuntimeError: Where CUDA is not the dry driver's (`python -m lowtide phantom`),
            or inside another timeline.
        ValueError: For an accelerator that is not listed.
    """

    def __init__(
        self,
        accelerator: str | Accelerator | None = None,
        *,
        network: Network | None = None,
        ranks_per_node: int | None = None,
        host: Host = machines.HOST,
    ) -> None:
        accelerator = accelerator or os.environ.get("LOWTIDE_DRY_GPU", "h100")
        if isinstance(accelerator, str):
            network = network or machines.network_of(accelerator)
            accelerator = machines.accelerator_named(accelerator)
        network = network or machines.DGX
        if ranks_per_node is not None:
            network = dataclasses.replace(network, ranks_per_node=ranks_per_node)
        self.accelerator = accelerator
        self.network = network
        self.host = host
        self._steps: list[int] = []  # their first mark
        self._num_marks = 0
        self._spans: list[Span] | None = None  # once it has ended
        self._marks: list[tuple[str, float]] = []

    def __enter__(self) -> "timeline":
        if not timekeeper.is_here():
            raise RuntimeError(
                "lowtide: phantom.timeline: expected a process whose CUDA is the dry "
                "driver's, got one without. Start it with `python -m lowtide phantom "
                "-- PROGRAM`."
            )
        triton_work.install()
        figures = machines.flat(self.accelerator, self.network, self.host)
        if not timekeeper.start(figures):
            raise RuntimeError(
                "lowtide: phantom.timeline: expected one at a time, got another one "
                "that still runs. Leave the `with` block of the first."
            )
        global _started
        _started += 1
        self._number = _started
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mark("end")
        timekeeper.stop()
        self._spans = timekeeper.spans()
        self._marks = timekeeper.phases()

    # -- while it runs ----------------------------------------------------------------

    def begin_step(self) -> None:
        """A step lasts until the next one, or the end of the block."""
        self._steps.append(self._num_marks)

    def phase(self, name: str) -> None:
        """What is issued from here on belongs to phase ``name`` of the step."""
        self._mark(name)

    @staticmethod
    def now() -> float:
        """When all that was issued on the compute stream so far will be done."""
        return timekeeper.time_of(timekeeper.moment())

    def _mark(self, name: str) -> None:
        timekeeper.mark(name)
        self._num_marks += 1

    # -- afterwards -------------------------------------------------------------------

    def report(self, step: int = -1) -> StepTime:
        """The times of one step; the last one is the steady one."""
        return self.report_of(self._marks_of(step))

    def report_of(self, marks: list[tuple[str, float]]) -> StepTime:
        """The times of phases that begin at these seconds; the last mark ends them."""
        self._ended()
        if self._number != _started:
            raise RuntimeError(
                "lowtide: phantom.timeline: expected a report before the next timeline "
                "began, got one afterwards. Take it earlier."
            )
        phases: dict[str, Usage] = {}
        for (name, begin), (_, end) in zip(marks, marks[1:], strict=False):
            usage = Usage(*timekeeper.usage(begin, end))
            phases[name] = phases[name] + usage if name in phases else usage
        begin, end = marks[0][1], marks[-1][1]
        collectives: Counter[str] = Counter()
        num_bytes: defaultdict[str, float] = defaultdict(float)
        for span in self.spans(begin, end):
            if span.kind == "collective":
                collectives[span.name] += 1
                num_bytes[span.name] += span.bytes
        return StepTime(
            step=Usage(*timekeeper.usage(begin, end)),
            phases=phases,
            collectives=dict(collectives),
            collective_bytes=dict(num_bytes),
            assumptions=self.assumptions(),
        )

    def assumptions(self) -> dict[str, Any]:
        """All figures that the simulation used."""
        return {
            "accelerator": dataclasses.asdict(self.accelerator),
            "network": dataclasses.asdict(self.network),
            "host": dataclasses.asdict(self.host),
        }

    def spans(self, begin: float = 0, end: float = float("inf")) -> list[Span]:
        """All that begin in [begin, end), in the order in which they end."""
        return [span for span in self._ended() if begin <= span.begin < end]

    def chrome_trace(self, path: str | Path, step: int | None = None) -> None:
        """For chrome://tracing and https://ui.perfetto.dev; one step or all."""
        streams.write_chrome_trace(self, path, self._marks_of(step))

    def picture(self, path: str | Path, step: int = -1) -> None:
        """The streams of one step over time; needs matplotlib."""
        streams.draw(self, path, self._marks_of(step))

    def _ended(self) -> list[Span]:
        if self._spans is None:
            raise RuntimeError(
                "lowtide: phantom.timeline: expected a report after the `with` block, "
                "got one before its end. Leave the block first."
            )
        return self._spans

    def _marks_of(self, step: int | None) -> list[tuple[str, float]]:
        """The marks of a step, with the one that ends it; of all steps for None."""
        self._ended()
        marks = self._marks
        if step is None:
            return marks
        if not self._steps:
            raise ValueError(
                "lowtide: phantom.timeline: expected at least one begin_step(), got "
                "none. Call it before the phases of each step."
            )
        bounds = [*self._steps, len(marks) - 1]
        first = range(len(self._steps))[step]
        return marks[bounds[first] : bounds[first + 1] + 1]
