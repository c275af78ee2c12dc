"""Regions: what goes in, what comes out, and what backward may send.

[Note: A region's life]
A record (C++) is open for one forward. ``inputs`` makes an alias of every tensor.
Operators are typed by the checker; each leaves in the record its line, the numbers of
its autograd nodes and the collectives that its backward must send. The first gradient
of an output queues the settlement at the end of that backward, where the record says
what was sent beyond that, and what was not.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from lowtide import _C
from lowtide._base.backward import PerBackward
from lowtide.spmd import annotation
from lowtide.spmd.axes import rank_text
from lowtide.spmd.checker import Checker
from lowtide.spmd.declarations import Declaration, region_axes
from lowtide.spmd.eager import eager, not_traced, resume_compiler, suspend_compiler
from lowtide.spmd.frame import Frame, pop, push
from lowtide.spmd.replicas import comparing
from lowtide.spmd.source import line
from lowtide.spmd.types import Type, error

Fn = TypeVar("Fn", bound=Callable[..., Any])


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
    run eagerly: torch.compile breaks its graph around them.
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
        self.in_types, self.out_types, self.grad_types = in_types, out_types, grad_types
        self.mesh = mesh
        self._runs: list[tuple[_Run, Any]] = []  # with the compiler around it

    def __call__(self, fn: Fn) -> Fn:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            run = _Run(self)
            with run:
                run.take(bound.arguments)
                return run.outputs(fn(*bound.args, **bound.kwargs))

        return eager(wrapper)  # type: ignore[return-value]

    @not_traced
    def __enter__(self) -> _Run:
        compiler = suspend_compiler()
        try:
            run = _Run(self)
            run.__enter__()
        except BaseException:
            resume_compiler(compiler)
            raise
        self._runs.append((run, compiler))
        return run

    @not_traced
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run, compiler = self._runs.pop()
        try:
            run.__exit__(exc_type, exc, traceback)
        finally:
            resume_compiler(compiler)


class _Run:
    """One forward of a region."""

    def __init__(self, spec: region) -> None:
        declared = (spec.in_types, spec.out_types, spec.grad_types)
        axes = region_axes(spec.name, spec.mesh, declared)
        who = f"region {spec.name!r}"
        self._in = Declaration(f"{who}, input", spec.in_types, axes)
        self._out = Declaration(f"{who}, output", spec.out_types, axes)
        self._grad: Declaration | None = None
        if spec.grad_types is not None:
            self._grad = Declaration(f"{who}, gradient of", spec.grad_types, axes)
        self._check = spec.check
        self._frame = Frame(spec.name, axes, checks=spec.check)
        self._checker = Checker(self._frame) if spec.check else None
        self._inputs: list[tuple[str, weakref.ref[torch.Tensor], int]] = []
        self._finished = False
        self._backward: PerBackward[None] = PerBackward()

    def __enter__(self) -> _Run:
        self._frame.replicas = comparing(self._frame.name, self._frame.axes)
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
        names = list(self._in.types)
        if not self._in.by_name:
            names = [
                n for n, value in arguments.items() if isinstance(value, torch.Tensor)
            ]
        tensors = self.inputs(*(arguments[name] for name in names))
        arguments.update(zip(names, tensors, strict=True))

    def inputs(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The region's own names for ``tensors``, one for each entry of in_types."""
        self._expect("input", len(self._in), len(tensors))
        return tuple(
            self._input(index, name, tensor)
            for index, (name, tensor) in enumerate(
                zip(self._in.types, tensors, strict=True)
            )
        )

    def _expect(self, what: str, expected: int, got: int) -> None:
        if got != expected:
            raise ValueError(
                f"lowtide: region {self._frame.name!r}: expected {expected} {what} "
                f"tensors, got {got}. Declare one entry for each."
            )

    def _input(self, index: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        frame = self._frame
        declared = self._in.types[name]
        for axis_name, passed in annotation.types_of(tensor, frame.axes).items():
            axis = frame.axis_named(axis_name)
            if declared[axis.key] == passed.value:
                continue
            known = annotation.of(tensor)
            source = known.origin if known else "spmd_types"
            raise error(
                f"region {frame.name!r}",
                f"input {name!r} to be {declared[axis.key]} over {axis}",
                f"{passed} from the caller ({source}, {line()}) {rank_text()}",
                "Convert it before the call, or declare what is passed.",
            )
        with frame.paused():
            own = tensor.view_as(tensor)
        annotation.put(own, declared, f"region {frame.name!r}, input {name!r}")
        self._inputs.append((name, weakref.ref(tensor), tensor._version))
        frame.add_value(own, declared, f"input {name!r}", line())
        self._watch_gradient(index, name, own, declared)
        return own

    def _watch_gradient(
        self, index: int, name: str, own: torch.Tensor, declared: Mapping[str, str]
    ) -> None:
        if self._grad is None:
            return
        frame = self._frame
        wanted = list(self._grad.types.values())[index]
        needs = []
        for axis in frame.axes:
            follows = Type(declared[axis.key]).gradient.value
            if wanted[axis.key] == follows:
                continue
            if self._check:
                raise error(
                    f"region {frame.name!r}",
                    f"the gradient of input {name!r} to be declared {follows} over "
                    f"{axis}, as {declared[axis.key]} has it",
                    f"{wanted[axis.key]} {rank_text()}",
                    "Leave grad_types out: with check=True gradients follow from the "
                    "types.",
                )
            kind = _C.gradient_collective(follows, wanted[axis.key])
            if kind and axis.size > 1:
                needs.append((kind, axis.group_name))
        if needs and own.requires_grad:
            record = frame.record

            def require(_gradient: torch.Tensor) -> None:
                for kind, group in needs:
                    record.require_anywhere(kind, group, f"the gradient of {name!r}")

            own.register_hook(require)

    def outputs(self, values: Any) -> Any:
        """``values`` as they leave: a tensor, or a tuple or list of tensors."""
        several = isinstance(values, (tuple, list))
        tensors = list(values) if several else [values]
        self._expect("output", len(self._out), len(tensors))
        with self._frame.paused():
            for index, tensor in enumerate(tensors):
                self._output(index, tensor)
        self._finished = True
        return values

    def _output(self, index: int, tensor: torch.Tensor) -> None:
        frame = self._frame
        declared = list(self._out.types.values())[index]
        if self._checker is not None:
            self._checker.check_output(index, tensor, declared)
        else:
            frame.add_value(tensor, declared, f"output {index}", line())
        annotation.put(tensor, declared, f"region {frame.name!r}, output {index}")
        if tensor.requires_grad:
            tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _gradient: torch.Tensor) -> None:
        self._backward.get(self._refuse_changed_inputs, self._settle)

    def _settle(self, _begun: None) -> None:
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
