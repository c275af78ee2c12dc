"""Regions: what goes in, what comes out, and what backward may send.

[Note: A region's life]
``inputs`` makes an alias of every tensor and opens a record (C++). Operators are typed
by the checker; each leaves its line and the numbers of its autograd nodes in the record,
with the collectives that its backward must send. ``outputs`` closes the record. The
first gradient of an output queues the settlement at the end of that backward, where
the record says what was sent beyond that, and what was not.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lowtide.spmd import annotations, axes
from lowtide.spmd.axes import Axis, rank_text
from lowtide.spmd.checker import Checker
from lowtide.spmd.frame import Frame, pop, push
from lowtide.spmd.replicas import comparing
from lowtide.spmd.source import line
from lowtide.spmd.types import Type, error
from lowtide import _C

Fn = TypeVar("Fn", bound=Callable[..., Any])
# One tensor's: a type for every axis, or by axis.
TensorTypes = "Type | Mapping[str | dist.ProcessGroup | DeviceMesh | Axis, Type]"


def is_one(types: Any) -> bool:
    """One tensor's types, not several tensors'."""
    if isinstance(types, Type):
        return True
    return isinstance(types, Mapping) and all(
        isinstance(type_, Type) for type_ in types.values()
    )


class region:
    """A piece of a model whose communication follows from its types.

        @spmd.region("mlp", in_types={"x": R, "w": V}, out_types=P, mesh=mesh["tp"])
        def mlp(x, w): ...

        with spmd.region("mlp", [R, V], P, mesh=mesh["tp"]) as mlp:
            x, w = mlp.inputs(x, w)
            y = mlp.outputs(...)

    ``in_types`` has one entry for each tensor: by parameter name, or in order.
    ``out_types`` is one entry, or one for each tensor returned. An entry is a type, for
    all axes, or a type for each axis. ``mesh`` defaults to that of
    :func:`~lowtide.spmd.use_mesh`; axes may also be given as process groups.

    ``check=False`` looks at no operator: what the body does in backward is then said by
    ``grad_types``, the type of each input's gradient, which it requires. A gradient
    that is not of the type that follows from the input's costs one collective, the
    body's own.

    Raises ReplicationError where a declared type is not the inferred one, an operator
    has no rule, or backward sends anything else than what the types require. Regions
    are for eager code.
    """

    def __init__(
        self,
        name: str,
        in_types: Any,
        out_types: Any,
        grad_types: Any = None,
        *,
        mesh: DeviceMesh | None = None,
        check: bool = True,
    ) -> None:
        if not check and grad_types is None:
            raise ValueError(
                f"lowtide: region {name!r}: expected grad_types with check=False, got "
                f"none. Say what the gradient of every input is, as the operators are "
                f"not looked at."
            )
        self.name = name
        self.check = check
        self._in, self._out, self._grad = in_types, out_types, grad_types
        self._mesh = mesh
        self._runs: list[_Run] = []

    def __call__(self, fn: Fn) -> Fn:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            run = _Run(self)
            with run:
                run.take(bound.arguments)
                return run.outputs(fn(*bound.args, **bound.kwargs))

        return wrapper  # type: ignore[return-value]

    def __enter__(self) -> _Run:
        run = _Run(self)
        run.__enter__()
        self._runs.append(run)
        return run

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runs.pop().__exit__(exc_type, exc, traceback)

    # What follows reads the declarations.

    def axes(self) -> tuple[Axis, ...]:
        mesh = self._mesh or axes.current_mesh()
        if mesh is not None:
            return axes.axes_of(mesh)
        named: dict[str, Axis] = {}
        for types in (*self._entries(self._in), *self._entries(self._out)):
            if isinstance(types, Mapping):
                for axis in map(axes.resolve, types):
                    named[axis.key] = axis
        if not named:
            raise ValueError(
                f"lowtide: region {self.name!r}: expected a mesh, got none. Pass mesh=, "
                f"or call inside `with lowtide.spmd.use_mesh(mesh)`."
            )
        return tuple(named.values())

    @staticmethod
    def _entries(declared: Any) -> list[Any]:
        if is_one(declared):
            return [declared]
        return list(declared.values() if isinstance(declared, Mapping) else declared)

    def in_names(self) -> list[str]:
        if isinstance(self._in, Mapping) and not is_one(self._in):
            return list(self._in)
        return [str(i) for i in range(len(self._entries(self._in)))]

    def types(self, kind: str, index: int, frame_axes: Sequence[Axis]) -> dict[str, str]:
        """By axis key, of tensor `index` of the inputs, outputs or gradients."""
        declared = {"input": self._in, "output": self._out, "gradient": self._grad}[kind]
        if isinstance(declared, Mapping) and not is_one(declared) and kind == "gradient":
            types = declared[self.in_names()[index]]
        else:
            types = self._entries(declared)[index]
        if isinstance(types, Type):
            return {axis.key: types.value for axis in frame_axes}
        found = {self._resolve(a, frame_axes).key: t.value for a, t in types.items()}
        missing = [axis for axis in frame_axes if axis.key not in found]
        if missing:
            raise ValueError(
                f"lowtide: region {self.name!r}, {kind} {index}: expected a type for "
                f"every axis, got none for {missing}. Write one of R, I, V, P."
            )
        return found

    def _resolve(self, axis: Any, frame_axes: Sequence[Axis]) -> Axis:
        for known in frame_axes:
            if axis == known.name:
                return known
        return axes.resolve(axis)

    def count(self, kind: str) -> int:
        declared = {"input": self._in, "output": self._out, "gradient": self._grad}[kind]
        return len(self._entries(declared))


class _Run:
    """One forward of a region."""

    def __init__(self, spec: region) -> None:
        self._spec = spec
        self._frame = Frame(spec.name, spec.axes(), checks=spec.check)
        self._checker = Checker(self._frame) if spec.check else None
        self._inputs: list[tuple[str, weakref.ref[torch.Tensor], int]] = []
        self._finished = False
        self._task: int | None = None

    def __enter__(self) -> _Run:
        self._frame.replicas = comparing(self._frame)
        self._frame.record.open()
        push(self._frame)
        if self._checker is not None:
            self._checker.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._checker is not None:
            self._checker.__exit__(exc_type, exc, traceback)
        pop(self._frame)
        stray = self._frame.record.close()
        if exc is not None:
            return
        self._frame.raise_for_forward(stray)
        if not self._finished:
            raise RuntimeError(
                f"lowtide: region {self._frame.name!r}: expected outputs(), got none. "
                f"Pass what leaves the region to outputs()."
            )
        if self._frame.replicas is not None:
            self._frame.replicas.compare_forward()

    @property
    def sent(self) -> dict[str, tuple[int, int]]:
        """Collective -> (calls, bytes) of this forward's backwards so far."""
        return self._frame.record.sent()

    def take(self, arguments: dict[str, Any]) -> None:
        """Replaces the tensors among a call's arguments by the region's."""
        names = self._spec.in_names()
        by_name = set(names) <= set(arguments)
        holders = [
            name
            for name, value in arguments.items()
            if (name in names if by_name else isinstance(value, torch.Tensor))
        ]
        if by_name:
            holders = names
        tensors = self.inputs(*(arguments[name] for name in holders))
        for name, tensor in zip(holders, tensors, strict=True):
            arguments[name] = tensor

    def inputs(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The region's own names for ``tensors``, one for each entry of in_types."""
        expected = self._spec.count("input")
        if len(tensors) != expected:
            raise ValueError(
                f"lowtide: region {self._frame.name!r}: expected {expected} input "
                f"tensors, got {len(tensors)}. Give in_types one entry for each."
            )
        names = self._spec.in_names()
        return tuple(
            self._input(i, name, tensor)
            for i, (name, tensor) in enumerate(zip(names, tensors, strict=True))
        )

    def _input(self, index: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        frame = self._frame
        declared = self._spec.types("input", index, frame.axes)
        for axis_name, passed in annotations.types_of(tensor, frame.axes).items():
            axis = frame.axis_named(axis_name)
            if declared[axis.key] == passed.value:
                continue
            known = annotations.of(tensor)
            source = known.origin if known else "spmd_types"
            raise error(
                f"region {frame.name!r}",
                f"input {name!r} to be {declared[axis.key]} over {axis}",
                f"{passed} from the caller ({source}, {line()}) {rank_text()}",
                "Convert it before the call, or declare what is passed.",
            )
        with frame.paused():
            own = tensor.view_as(tensor)
        annotations.put(own, declared, f"region {frame.name!r}, input {name!r}")
        self._inputs.append((name, weakref.ref(tensor), tensor._version))
        frame.add_value(own, declared, f"input {name!r}", line())
        self._watch_gradient(index, name, own, declared)
        return own

    def _watch_gradient(
        self, index: int, name: str, own: torch.Tensor, declared: Mapping[str, str]
    ) -> None:
        if self._spec._grad is None:
            return
        frame = self._frame
        wanted = self._spec.types("gradient", index, frame.axes)
        needs = []
        for axis in frame.axes:
            follows = Type(declared[axis.key]).gradient.value
            if wanted[axis.key] == follows:
                continue
            if self._spec.check:
                raise error(
                    f"region {frame.name!r}",
                    f"the gradient of input {name!r} to be declared {follows} over "
                    f"{axis}, as {declared[axis.key]} has it",
                    f"{wanted[axis.key]} {rank_text()}",
                    "Leave grad_types out: with check=True gradients follow from the "
                    "types.",
                )
            if kind := _C.gradient_collective(follows, wanted[axis.key]):
                needs.append((kind, axis.key))
        if needs and own.requires_grad:
            record = frame.record

            def require(_gradient: torch.Tensor) -> None:
                for kind, key in needs:
                    record.require_anywhere(kind, key, f"the gradient of {name!r}")

            own.register_hook(require)

    def outputs(self, values: Any) -> Any:
        """``values`` as they leave: a tensor, or a tuple or list of tensors."""
        several = isinstance(values, (tuple, list))
        tensors = list(values) if several else [values]
        expected = self._spec.count("output")
        if len(tensors) != expected:
            raise ValueError(
                f"lowtide: region {self._frame.name!r}: expected {expected} output "
                f"tensors, got {len(tensors)}. Give out_types one entry for each."
            )
        with self._frame.paused():
            for index, tensor in enumerate(tensors):
                self._output(index, tensor)
        self._finished = True
        return values

    def _output(self, index: int, tensor: torch.Tensor) -> None:
        frame = self._frame
        declared = self._spec.types("output", index, frame.axes)
        if self._checker is not None:
            self._checker.check_output(index, tensor, declared)
        else:
            frame.add_value(tensor, declared, f"output {index}", line())
        annotations.put(tensor, declared, f"region {frame.name!r}, output {index}")
        if tensor.requires_grad:
            tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _gradient: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        self._refuse_changed_inputs()
        torch.autograd.Variable._execution_engine.queue_callback(self._settle)

    def _settle(self) -> None:
        self._task = None
        self._frame.raise_for_backward(self._frame.record.settle())
        if self._frame.replicas is not None:
            self._frame.replicas.compare_backward()

    def _refuse_changed_inputs(self) -> None:
        """autograd notices a write to what it saved, but names neither the value nor
        the line; ours comes first."""
        changed = [
            (name, version, tensor)
            for name, reference, version in self._inputs
            if (tensor := reference()) is not None and tensor._version != version
        ]
        if not changed:
            return
        node = torch._C._current_autograd_node()
        found = self._frame.first_stale(node)
        if found is None:  # written to, but not needed
            return
        name, version, tensor = changed[0]
        raise error(
            f"region {self._frame.name!r}",
            f"input {name!r} as it was saved for backward (version {version})",
            f"version {tensor._version}: it was modified in place after {found} saved "
            f"it {rank_text()}",
            "Change a clone, or change it after backward.",
        )
