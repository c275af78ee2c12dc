"""The time a program would take: what the phantom device does, on a timeline."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from lowtide import _phantom
from lowtide.phantom import machines
from lowtide.phantom.machines import Accelerator, Network

COMPUTE_STREAM = 0
_FIRST_GROUP_STREAM = 1000  # csrc/phantom/time/timeline.h


class Span(NamedTuple):
    """One thing a stream does. Seconds since the timeline began."""

    kind: str  # kernel, transfer, collective; wait: idle until another stream is done
    stream: int
    begin: float
    end: float
    issued: float  # when the host did
    name: str
    flops: float
    bytes: float


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
    assumptions: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "StepTime":
        """The inverse of :meth:`to_dict`."""
        return cls(
            step=Usage(**fields["step"]),
            phases={name: Usage(**usage) for name, usage in fields["phases"].items()},
            collectives=fields["collectives"],
            assumptions=fields["assumptions"],
        )

    def __str__(self) -> str:
        columns = ("seconds", "compute", "communication", "exposed", "idle")
        rows: list[tuple[str, ...]] = [("simulated, ms", *columns)]
        for name, usage in (*self.phases.items(), ("step", self.step)):
            values = [f"{getattr(usage, column) * 1e3:.2f}" for column in columns]
            rows.append((name, *values))
        return "\n".join("".join(f"{cell:<15}" for cell in row) for row in rows)


class timeline:
    """Keeps time on the phantom device in a ``with`` block.

    Every operator becomes a kernel on its stream: the longer of its FLOPs and its bytes
    over the accelerator's figures. Collectives take what NCCL's tuning model says, run
    on the stream ProcessGroupNCCL would choose, and join the streams that wait for
    them. The host spends ``issue_cost`` on each. Streams do not slow each other down.

        with lowtide.phantom.timeline("h100") as time:
            for _ in range(3):
                time.begin_step()
                time.phase("forward")
                ...
        print(time.report())

    Args:
        accelerator: ``"h100"``, ``"h200"`` or figures of another.
        network: Links and protocols; a DGX with eight GPUs a node if not given.
        ranks_per_node: Instead of the network's.
        issue_cost: Seconds of the host for one operator or collective; its Python
            between them is not counted.

    Raises:
        RuntimeError: Without a phantom device, or inside another timeline.
        ValueError: For an accelerator that is not listed.
    """

    def __init__(
        self,
        accelerator: str | Accelerator = "h100",
        *,
        network: Network = machines.DGX,
        ranks_per_node: int | None = None,
        issue_cost: float = machines.ISSUE_COST,
    ) -> None:
        if isinstance(accelerator, str):
            accelerator = machines.accelerator_named(accelerator)
        if ranks_per_node is not None:
            network = dataclasses.replace(network, ranks_per_node=ranks_per_node)
        self.accelerator = accelerator
        self.network = network
        self.issue_cost = issue_cost
        self._steps: list[int] = []  # their first mark
        self._num_marks = 0
        self._recorded: _phantom.Timeline | None = None

    def __enter__(self) -> "timeline":
        _phantom.start_timeline(
            machines.native_accelerator(self.accelerator),
            machines.native_network(self.network),
            self.issue_cost,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mark("end")
        self._recorded = _phantom.stop_timeline()

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
        return _phantom.time_on_device()

    def _mark(self, name: str) -> None:
        _phantom.mark_phase(name)
        self._num_marks += 1

    # -- afterwards -------------------------------------------------------------------

    def report(self, step: int = -1) -> StepTime:
        """Of one step; the last one is the steady one."""
        return self.report_of(self._marks_of(step))

    def report_of(self, marks: list[tuple[str, float]]) -> StepTime:
        """The same for phases that begin at these seconds; the last mark ends it."""
        recorded = self._ended()
        phases: dict[str, Usage] = {}
        for (name, begin), (_, end) in zip(marks, marks[1:], strict=False):
            usage = Usage(**recorded.usage(begin, end))
            phases[name] = phases[name] + usage if name in phases else usage
        begin, end = marks[0][1], marks[-1][1]
        collectives: dict[str, int] = {}
        for span in self.spans(begin, end):
            if span.kind == "collective":
                collectives[span.name] = collectives.get(span.name, 0) + 1
        return StepTime(
            step=Usage(**recorded.usage(begin, end)),
            phases=phases,
            collectives=collectives,
            assumptions=self.assumptions(),
        )

    def assumptions(self) -> dict[str, Any]:
        """All figures that the simulation used."""
        return {
            "accelerator": dataclasses.asdict(self.accelerator),
            "network": dataclasses.asdict(self.network),
            "issue_cost": self.issue_cost,
            "streams": "run beside each other at full speed",
        }

    def spans(self, begin: float = 0, end: float = float("inf")) -> list[Span]:
        """All that begin in [begin, end), in the order of issue."""
        spans = (Span(*fields) for fields in self._ended().spans())
        return [span for span in spans if begin <= span.begin < end]

    def chrome_trace(self, path: str | Path, step: int | None = None) -> None:
        """For chrome://tracing and https://ui.perfetto.dev; one step or all."""
        from lowtide.phantom import streams

        streams.write_chrome_trace(self, path, self._marks_of(step))

    def picture(self, path: str | Path, step: int = -1) -> None:
        """The streams of one step over time; needs matplotlib."""
        from lowtide.phantom import streams

        streams.draw(self, path, self._marks_of(step))

    def _ended(self) -> _phantom.Timeline:
        if self._recorded is None:
            raise RuntimeError(
                "lowtide: phantom.timeline: expected a report after the `with` block, "
                "got one before its end. Leave the block first."
            )
        return self._recorded

    def _marks_of(self, step: int | None) -> list[tuple[str, float]]:
        """Of a step, with the mark that ends it; None: of all."""
        marks = self._ended().marks()
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


def name_of_stream(stream: int) -> str:
    if stream == COMPUTE_STREAM:
        return "compute"
    if stream >= _FIRST_GROUP_STREAM:
        return f"process group {stream - _FIRST_GROUP_STREAM}"
    return f"stream {stream}"
