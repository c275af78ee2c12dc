"""What a program allocates on its device, and what is known about it."""

import contextlib
import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lowtide._base.memory import ledger
from lowtide._sharding import stepped
from lowtide.planning.modules import ModuleTable, clean
from lowtide.planning.stacks import StackTable

# Between the node that computes a parameter's gradient and the parameter.
_PASS_THROUGH = (
    *("TBackward", "TransposeBackward", "PermuteBackward", "ViewBackward"),
    *("UnsafeViewBackward", "ReshapeAliasBackward", "ExpandBackward"),
    *("ToCopyBackward", "AliasBackward"),
)


# How much more often than asked for an optimizer may step while others do not, or on a
# stream beside the default one, as is done before a graph is captured.
_PATIENCE = 10


class Finished(BaseException):
    """The steps that were asked for are done; nothing a program would catch."""


@dataclass(slots=True)
class Allocation:
    address: int
    bytes: int  # asked for
    stream: int
    operator: str  # "aten::mm", "" outside of operators
    stack: int  # in the stack table
    module: str | None  # innermost on the stack
    in_backward: bool
    in_optimizer: bool
    sequence: int  # in backward: of the forward operator; forward: own; -1: none
    owner: str  # what FSDP2 says it is for, a parameter or unit; "" if nothing
    near_parameter: bool  # the backward of an operator on a parameter
    time: int  # a moment of lowtide.phantom.dry.timekeeper, on the compute stream
    lease: tuple[str, str] | None = None  # lowtide's category and unit


@dataclass(frozen=True)
class Label:
    """What the memory at an address is, seen when ``num_allocations`` were made."""

    num_allocations: int
    address: int
    category: str
    name: str


# address, bytes asked for, stream, operator; what is known later only is 0.
Listener = Callable[[int, int, int, str], None]


class Instrument(Protocol):
    """The device that a program is recorded on."""

    device: torch.device

    def listen(self, listener: Listener | None) -> None:
        """To every allocation; None: no longer."""

    def tell(self) -> None:
        """Tells the listener of all allocations that it has not heard of yet."""

    def num_frees(self) -> int: ...

    def clear_workspaces(self) -> None:
        """Frees those of cuBLAS."""

    def moment(self) -> int:
        """On the compute stream; its time is known when the program has ended."""


@dataclass
class Recorder:
    """Listens from :meth:`start` to :meth:`stop`; one at a time in a process."""

    instrument: Instrument
    num_steps: int
    progress: Callable[[int], None] = lambda step: None
    stacks: StackTable = field(default_factory=StackTable)
    modules: ModuleTable = field(default_factory=ModuleTable)
    allocations: list[Allocation] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    step_ends: list[int] = field(default_factory=list)  # in allocations
    step_frees: list[int] = field(default_factory=list)  # at the same ends
    step_times: list[int] = field(default_factory=list)  # at the same ends
    sharded: bool = False
    idle_steps: list[str] = field(default_factory=list)  # optimizers without gradients
    workspace_frees: range = range(0)  # which frees are those of cuBLAS's workspaces
    forward_sequences: dict[int, int] = field(default_factory=dict)  # -> allocation
    _in_optimizer: bool = False
    _has_gradients: bool = False
    _steps: "weakref.WeakKeyDictionary[Optimizer, int]" = field(
        default_factory=weakref.WeakKeyDictionary
    )  # of each optimizer that is there
    _hooks: list[Any] = field(default_factory=list)
    _construct: Any = None  # torch's own constructor of optimizers
    _replay: Any = None  # torch's own replay of graphs
    _captured: bool = False  # an optimizer's step, in a graph

    def __post_init__(self) -> None:
        self._leases = _LeaseWatch(self.instrument.device)

    def start(self) -> None:
        self._watch_optimizers()
        self._watch_graphs()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self.instrument.listen(self._allocated)

    def stop(self) -> None:
        self.instrument.tell()
        self.instrument.listen(None)
        Optimizer.__init__ = self._construct  # type: ignore[method-assign]
        torch.cuda.CUDAGraph.replay = self._replay  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()
        self._watch_leases()
        begin = self.instrument.num_frees()
        self.instrument.clear_workspaces()
        self.workspace_frees = range(begin, self.instrument.num_frees())

    def unheard(self, address: int) -> Allocation:
        """One that the listener did not hear of."""
        nowhere = self.stacks.add(None)[0]
        return Allocation(
            address, 0, 0, "", nowhere, None, False, False, -1, "", False, 0
        )

    # -- the listener -----------------------------------------------------------------

    def _allocated(self, address: int, bytes: int, stream: int, operator: str) -> None:
        self._watch_leases()
        stack, calls, owner = self.stacks.add(sys._getframe().f_back)
        in_backward = torch._C._current_graph_task_id() != -1
        node = torch._C._current_autograd_node() if in_backward else None
        if node is not None:
            sequence = node._sequence_nr()
        elif in_backward:
            sequence = -1
        else:
            # The node of a differentiable operator exists before its kernel runs.
            sequence = torch.autograd._get_sequence_nr() - 1
            self.forward_sequences.setdefault(sequence, len(self.allocations))
        self.allocations.append(
            Allocation(
                address,
                bytes,
                stream,
                operator,
                stack,
                self.modules.path(calls),
                in_backward,
                self._in_optimizer,
                sequence,
                clean(owner),
                node is not None and _reaches_parameter(node, depth=3),
                self.instrument.moment(),
                self._leases.of(address),
            )
        )

    def _watch_leases(self) -> None:
        self._leases.take(self.allocations[-1] if self.allocations else None)

    # -- the optimizer ----------------------------------------------------------------

    def _watch_optimizers(self) -> None:
        """One that has not stepped yet is waited for."""
        construct = self._construct = Optimizer.__init__

        @functools.wraps(construct)
        def construct_and_count(optimizer: Optimizer, *args: Any, **kw: Any) -> None:
            construct(optimizer, *args, **kw)
            self._steps.setdefault(optimizer, 0)

        Optimizer.__init__ = construct_and_count  # type: ignore[method-assign,assignment]

    def _watch_graphs(self) -> None:
        """A step that is replayed calls no optimizer: its capture was the last one."""
        graphs: Any = torch.cuda.CUDAGraph
        replay = self._replay = graphs.replay

        def replay_or_finish(graph: torch.cuda.CUDAGraph) -> None:
            if self._captured:
                raise Finished
            replay(graph)

        graphs.replay = replay_or_finish

    def waiting(self) -> list[str]:
        """Optimizers that stepped less often than was asked for."""
        return [type(o).__name__ for o, n in self._steps.items() if n < self.num_steps]

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._in_optimizer = True
        self._has_gradients = _has_gradients(optimizer)
        names = {id(p): name for name, p in self.modules.named_parameters()}
        for place, parameter in enumerate(_parameters(optimizer)):
            name = names.get(id(parameter), f"parameter {place}")
            self.sharded |= type(parameter.data) is not torch.Tensor
            self._label("parameters", name, parameter)
            if parameter.grad is not None:
                self._label("gradients", name, parameter.grad)
        for name, parameter in self.modules.named_parameters():
            self._label("parameters", name, parameter)
        for name, buffer in self.modules.named_buffers():
            self._label("buffers", name, buffer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.instrument.tell()
        names = {id(p): name for name, p in self.modules.named_parameters()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    name = names.get(id(parameter), "parameter")
                    self._label("optimizer_state", f"{name} {key}", value)
        self._in_optimizer = False
        in_backward = stepped.is_attached(optimizer)  # where it had its gradients
        if not (self._has_gradients or _has_gradients(optimizer) or in_backward):
            self.idle_steps.append(type(optimizer).__name__)
        done = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if done <= len(self.step_ends):  # another optimizer's part of the step
            self.step_ends.pop()
            self.step_frees.pop()
            self.step_times.pop()
        else:
            self.progress(min(done, self.num_steps))
        self.step_frees.append(self.instrument.num_frees())
        self.step_times.append(self.instrument.moment())
        self.step_ends.append(len(self.allocations))
        self._captured |= torch.cuda.is_current_stream_capturing()
        more_to_come = self.waiting() or _is_on_a_side_stream()
        if not more_to_come or done >= _PATIENCE * self.num_steps:
            raise Finished

    def _label(self, category: str, name: str, tensor: torch.Tensor) -> None:
        for address in _addresses(tensor):
            self.labels.append(Label(len(self.allocations), address, category, name))


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_on_a_side_stream() -> bool:
    cuda = torch.cuda
    return cuda.is_initialized() and cuda.current_stream() != cuda.default_stream()


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for p in _parameters(optimizer))


def _addresses(tensor: torch.Tensor) -> Iterator[int]:
    """Where the device's memory behind it begins, also inside of wrapper
    subclasses."""
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        yield from _addresses(local)
    elif tensor.device.type == "cuda" and tensor.untyped_storage().nbytes():
        with contextlib.suppress(RuntimeError):  # a full parameter without bytes
            yield tensor.untyped_storage().data_ptr()


def _reaches_parameter(node: Any, depth: int) -> bool:
    for following, _ in node.next_functions:
        if following is None:
            continue
        name = following.name()
        if name.endswith("AccumulateGrad") or name.endswith("GradientNode"):
            return True
        if depth and name.startswith(_PASS_THROUGH):
            if _reaches_parameter(following, depth - 1):
                return True
    return False


class _LeaseWatch:
    """What lowtide leased: an instrument tells of an allocation either before its lease
    is logged or after."""

    def __init__(self, device: torch.device) -> None:
        self._ledger = ledger(device)
        self._ledger.take_log()
        self._unheard: dict[int, deque[tuple[str, str]]] = {}

    def take(self, last: Allocation | None) -> None:
        """``last``: what was heard of last, if anything."""
        for address, *lease in self._ledger.take_log():
            if last is not None and last.address == address and last.lease is None:
                last.lease = (lease[0], lease[1])
            else:
                self._unheard.setdefault(address, deque()).append((lease[0], lease[1]))

    def of(self, address: int) -> tuple[str, str] | None:
        """Which one the allocation is for that is heard of now."""
        waiting = self._unheard.get(address)
        return waiting.popleft() if waiting else None
