"""From a recording to figures: the life of every allocation, and what it is for."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from lowtide.planning import categories
from lowtide.planning.history import History, Operation
from lowtide.planning.moments import moments_of
from lowtide.planning.recording import Allocation, Label, Recorder
from lowtide.planning.stacks import Line, program_line


@dataclass
class Life:
    """An allocation, from the operation that makes it to the one that frees it (their
    number if none does)."""

    recorded: Allocation
    moment: str
    block: int = 0  # bytes, as the allocator rounds
    begin: int = 0
    end: int = 0
    category: str = ""
    name: str = ""  # of the parameter, state or unit; "" if it has none
    line: str = ""  # file:line function
    code: str = ""  # the text of that line
    made_in: str = ""  # the file of the innermost function
    module: str | None = None
    of_loss: bool = False  # made by the loss or by its backward


@dataclass
class Analysis:
    recorder: Recorder
    history: History
    lives: list[Life] = field(default_factory=list)
    _lines: dict[int, list[Line]] = field(default_factory=dict)
    _losses: dict[int, bool] = field(default_factory=dict)
    _forwards: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, recorder: Recorder, history: History) -> "Analysis":
        """``history``: since before the first allocation."""
        analysis = cls(recorder, history)
        recorded = _in_order(recorder, history.addresses)
        moments = moments_of(recorded, recorder.step_ends, analysis._is_loss)
        analysis.lives = [Life(*pair) for pair in zip(recorded, moments, strict=True)]
        analysis._replay()
        analysis._forwards = sorted(recorder.forward_sequences)
        next_backward = len(analysis.allocated)
        for life in reversed(analysis.lives):
            if life.moment == "backward":
                next_backward = life.begin
            analysis._describe(life, outlives_forward=life.end > next_backward)
        _keep_one_gradient_each(analysis.lives)
        return analysis

    @property
    def operations(self) -> list[Operation]:
        return self.history.operations

    @property
    def allocated(self) -> list[int]:
        """After each operation."""
        return self.history.allocated

    @property
    def reserved(self) -> list[int]:
        return self.history.reserved

    # -- questions --------------------------------------------------------------------

    def live_at(self, operation: int) -> list[Life]:
        return [life for life in self.lives if life.begin <= operation < life.end]

    def peak(self, within: range | None = None) -> int:
        """The last operation after which most is allocated."""
        places = within or range(len(self.allocated))
        return max(places, key=lambda place: (self.allocated[place], place))

    def steps(self) -> list[range]:
        """The operations of each step. The first step begins with the program."""
        ends = zip(self.recorder.step_ends, self.recorder.step_frees, strict=True)
        counts = {"allocate": 0, "free": 0}
        result: list[range] = []
        begin = 0
        end = next(ends, None)
        for place, operation in enumerate(self.operations):
            while end is not None and (counts["allocate"], counts["free"]) == end:
                result.append(range(begin, place))
                begin, end = place, next(ends, None)
            if operation.op in counts:
                counts[operation.op] += 1
        if end is not None:
            result.append(range(begin, len(self.operations)))
        return result

    def moment_at(self, operation: int) -> str:
        """The moment that the newest allocation then was made in."""
        place = bisect.bisect_right(self.lives, operation, key=lambda life: life.begin)
        return self.lives[max(place - 1, 0)].moment

    # -- the life of every allocation -------------------------------------------------

    def _replay(self) -> None:
        """Also gives each label to the allocation that was live at its address."""
        named = _Names(self.recorder.labels)
        num_frees = 0
        for place, operation in enumerate(self.operations):
            identity = operation.id
            if operation.op == "allocate":
                assert identity is not None and operation.bytes is not None
                life = self.lives[identity]
                life.begin, life.end = place, len(self.operations)
                life.block = self.history.blocks[identity]
                life.recorded.bytes = operation.bytes
                life.recorded.stream = operation.stream or 0
                named.begin(life, identity + 1)
            elif operation.op == "free":
                assert identity is not None
                self.lives[identity].end = place
                if num_frees in self.recorder.workspace_frees:
                    self.lives[identity].category = "cublas_workspace"
                num_frees += 1
                named.end(self.lives[identity])

    # -- what it is for ---------------------------------------------------------------

    def _describe(self, life: Life, *, outlives_forward: bool) -> None:
        recorded = life.recorded
        lines = self._lines_of(recorded.stack)
        origin = self._forward_of(recorded) if recorded.in_backward else None
        life.module = recorded.module
        shown = program_line(lines)
        life.made_in = lines[0].file if lines else ""
        recomputes = recorded.in_backward and recorded.module is not None
        life.of_loss = life.moment == "loss" or self._is_loss(recorded)
        if recorded.in_backward and not recomputes and origin is not None:
            life.module = origin.recorded.module
            life.of_loss = origin.moment == "loss"
            shown = program_line(self._lines_of(origin.recorded.stack)) or shown
        shown = shown or (lines[0] if lines else None)
        life.line, life.code = (str(shown), shown.text) if shown else ("", "")
        if lease := recorded.lease:
            life.category, life.name = categories.lease_category(lease[0]), lease[1]
        if not life.category:
            life.category = self._known_category(
                life, lines, recomputes
            ) or self._by_moment(life, recomputes, outlives_forward)

    def _known_category(
        self, life: Life, lines: list[Line], recomputes: bool
    ) -> str | None:
        recorded = life.recorded
        if known := categories.wrapper_category(lines):
            life.name = recorded.owner
            return known
        in_forward = recomputes or not recorded.in_backward
        if categories.is_cast(recorded) if in_forward else recorded.near_parameter:
            parameter = categories.parameter_of_size(
                recorded, life.module, self.recorder.modules
            )
            if parameter is not None:
                life.name = parameter
                return "gathered_parameters" if in_forward else "full_gradients"
        return None

    def _by_moment(self, life: Life, recomputes: bool, outlives_forward: bool) -> str:
        if life.moment == "setup":
            return "other"
        if life.moment == "optimizer":
            return "temporaries"
        if life.moment == "backward":
            return "recomputed" if recomputes else "backward_values"
        if life.moment == "forward" and life.recorded.module is None:
            return "inputs"
        return "activations" if outlives_forward else "temporaries"

    def _forward_of(self, allocation: Allocation) -> Life | None:
        """By the operator whose backward this is."""
        place = bisect.bisect_right(self._forwards, allocation.sequence)
        if allocation.sequence < 0 or not place:
            return None
        number = self.recorder.forward_sequences[self._forwards[place - 1]]
        return self.lives[number]

    def _lines_of(self, stack: int) -> list[Line]:
        if stack not in self._lines:
            self._lines[stack] = self.recorder.stacks.lines(stack)
        return self._lines[stack]

    def _is_loss(self, allocation: Allocation) -> bool:
        stack = allocation.stack
        if stack not in self._losses:
            self._losses[stack] = categories.is_loss(self._lines_of(stack))
        return self._losses[stack]


def _in_order(recorder: Recorder, addresses: list[int]) -> list[Allocation]:
    """Threads that allocate at once may be heard in another order than they were
    served in."""
    allocations = recorder.allocations
    if [a.address for a in allocations] == addresses:
        return allocations
    heard: dict[int, list[Allocation]] = {}
    for allocation in reversed(allocations):
        heard.setdefault(allocation.address, []).append(allocation)
    return [
        heard[address].pop() if heard.get(address) else recorder.unheard(address)
        for address in addresses
    ]


def _keep_one_gradient_each(lives: list[Life]) -> None:
    """The gradient of an operator's input may be as large as the parameter's; the
    parameter's lives longer."""
    found: dict[tuple[str, int], Life] = {}
    for life in lives:
        if life.category != "full_gradients" or life.recorded.lease:
            continue
        key = life.name, life.recorded.sequence
        other = found.get(key)
        if other is None or other.end <= life.end:
            found[key], other = life, other
        else:
            other = life
        if other is not None:
            other.category, other.name = "backward_values", ""


class _Names:
    """Applies labels while allocations come and go."""

    def __init__(self, labels: list[Label]) -> None:
        self._labels: Iterator[Label] = iter(labels)
        self._next = next(self._labels, None)
        self._addresses: list[int] = []  # live, ascending
        self._live: dict[int, Life] = {}

    def begin(self, life: Life, num_allocations: int) -> None:
        address = life.recorded.address
        bisect.insort(self._addresses, address)
        self._live[address] = life
        while self._next and self._next.num_allocations <= num_allocations:
            self._apply(self._next)
            self._next = next(self._labels, None)

    def end(self, life: Life) -> None:
        address = life.recorded.address
        del self._addresses[bisect.bisect_left(self._addresses, address)]
        del self._live[address]

    def _apply(self, label: Label) -> None:
        place = bisect.bisect_right(self._addresses, label.address) - 1
        if place < 0:
            return
        address = self._addresses[place]
        life = self._live[address]
        if label.address < address + life.block:
            life.category, life.name = label.category, label.name
