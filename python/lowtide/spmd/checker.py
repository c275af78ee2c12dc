"""Infers the type of every value that a region computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.distributed import _mesh_layout, device_mesh
from torch.overrides import TorchFunctionMode

from lowtide import _C
from lowtide.spmd import annotation, rules
from lowtide.spmd.annotation import CONSTANT
from lowtide.spmd.axes import Axis
from lowtide.spmd.frame import Frame, current
from lowtide.spmd.rules import LOCAL, Rule
from lowtide.spmd.source import line
from lowtide.spmd.types import ReplicationError

# A number beside a tensor is an input of these: x + 1 is not linear in x.
_ADDS_NUMBERS = {"aten::add", "aten::sub", "aten::subtract", "aten::rsub"}
_ADDS_NUMBERS |= {f"{name}_" for name in _ADDS_NUMBERS} | {"aten::setitem"}

Types = dict[str, str]  # by the axis's key


class Checker(TorchFunctionMode):
    """Sees what a region's Python calls: torch's functions and operators."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._frame.looks or _is_of_a_mesh(sys._getframe(1)):
            return func(*args, **kwargs)
        name = rules.call_name(func)
        rule = rules.rule_of(func, name, args, kwargs)
        if rule is None:
            result = func(*args, **kwargs)
            if any(True for _ in tensors_in(result)):
                raise self._no_rule(func, name)
            return result  # shapes, flags, dtypes
        return self._typed(name, rule, args, kwargs, func)

    def check_output(
        self, index: int, tensor: torch.Tensor, declared: Mapping[str, str]
    ) -> None:
        inferred = self._types(tensor, f"output {index}")
        for axis in self._frame.axes:
            want, have = declared[axis.key], inferred[axis.key]
            if want == have or (have == CONSTANT and want in "RI"):
                continue
            # Without a gradient they are the same.
            if {want, have} == {"R", "I"} and not tensor.requires_grad:
                continue
            raise self._frame.fail(
                f"output {index} to be {want} over {axis}, as declared",
                f"{have}, inferred at {line()}",
                _way(have, want, axis),
            )

    # One operator.

    def _typed(
        self,
        name: str,
        rule: Rule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        func: Callable[..., Any],
    ) -> Any:
        where = line()
        operands = [
            tensor
            for key, value in (*enumerate(args), *kwargs.items())
            if key != "out"
            for tensor in tensors_in(value)
        ]
        inputs = [
            self._types(t, f"input {i} of {name}") for i, t in enumerate(operands)
        ]
        numbers = name.partition(".")[0] in _ADDS_NUMBERS and any(
            isinstance(value, (int, float, complex)) and value != 0
            for value in (*args[:3], *kwargs.values())
        )
        over = self._axis_of(name, rule, inputs, args, kwargs)
        result_types = {
            axis.key: self._infer(
                name, rule if over in (None, axis) else LOCAL, axis, operands, inputs,
                numbers, where,
            )
            for axis in self._frame.axes
        }  # fmt: skip
        result = self._run(name, rule, over, where, operands, func, args, kwargs)
        self._annotate(name, result, result_types, operands, inputs, where)
        return result

    def _run(
        self,
        name: str,
        rule: Rule,
        over: Axis | None,
        where: str,
        operands: list[torch.Tensor],
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        frame = self._frame
        frame.record.begin_operator(name, where)
        try:
            if over is not None:
                kind = _C.collective_backward(rule.src, rule.dst)
                if kind and over.size > 1 and _needs_gradient(operands[0]):
                    frame.record.require(kind, over.group_name)
            with frame.paused():
                result = func(*args, **kwargs)
        finally:
            findings = frame.record.end_operator()
        if over is None:
            frame.raise_for_operator(findings, repr(rule))
        return result

    def _infer(
        self,
        name: str,
        rule: Rule,
        axis: Axis,
        operands: list[torch.Tensor],
        inputs: list[Types],
        numbers: bool,
        where: str,
    ) -> str:
        given = [
            (types[axis.key], _needs_gradient(tensor))
            for tensor, types in zip(operands, inputs, strict=True)
        ]
        if numbers:
            given.append((CONSTANT, False))
        found, expected, remedy = _C.infer_type(rule, given, repr(axis))
        if found:
            return found
        shown = ", ".join(type_ for type_, _ in given)
        raise self._frame.fail(
            f"that {expected}", f"{name}({shown}) over {axis} at {where}", remedy
        )

    def _axis_of(
        self,
        name: str,
        rule: Rule,
        inputs: list[Types],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Axis | None:
        """The axis of a collective, as its arguments, its registration or its input
        say."""
        if not rule.communicates:
            return None
        axes = self._frame.axes
        passed = {
            getattr(value, "group_name", value)
            for value in (*args, *kwargs.values())
            if isinstance(value, str) or rules.is_group(value)
        } | {rules.axis_of(name)}
        found = [axis for axis in axes if passed & {axis.group_name, axis.name}]
        if not found:
            found = [a for a in axes if inputs and inputs[0][a.key] == rule.src]
        if len(axes) == 1:
            return axes[0]
        if len(found) == 1:
            return found[0]
        raise self._frame.fail(
            f"to know which axis {name} communicates over",
            f"{found or list(axes)} at {line()}",
            f"Name it: register_rule({name!r}, {rule!r}, axis=...), or pass the "
            f"operator its process group.",
        )

    # Types of tensors.

    def _types(self, tensor: torch.Tensor, what: str) -> Types:
        known = annotation.of(tensor)
        node = tensor.grad_fn
        if isinstance(node, BackwardCFunction) and (
            known is None or known.node != node._sequence_nr()
        ):
            raise self._no_rule_for_function(node._forward_cls)
        found = {}
        foreign = annotation.types_of(tensor, self._frame.axes) if not known else {}
        for axis in self._frame.axes:
            type_ = known.on(axis) if known else None
            if type_ is None and axis.name in foreign:
                type_ = foreign[axis.name].value
            if type_ is None:
                raise self._frame.fail(
                    f"to know what {what} is over {axis}",
                    f"{describe(tensor)} from outside of the region at {line()}",
                    "Declare it in in_types, or call spmd.annotate(tensor, "
                    "{axis: R, I, V or P}) where it is made.",
                )
            found[axis.key] = type_
        return found

    def _annotate(
        self,
        name: str,
        result: Any,
        types: Types,
        operands: list[torch.Tensor],
        inputs: list[Types],
        where: str,
    ) -> None:
        frame = self._frame
        # `setitem` returns nothing: its first operand is what it wrote to.
        written = operands[:1] if name == "aten::setitem" else []
        for tensor in [*tensors_in(result), *written]:
            for operand, before in zip(operands, inputs, strict=True):
                if operand is tensor and before != types:
                    self._check_written(name, tensor, before, types, where)
            own = {} if set(types.values()) == {CONSTANT} else types
            annotation.put(tensor, own, f"region {frame.name!r}, {name} at {where}")
            frame.add_value(tensor, types, name, where)
            if frame.replicas is not None:
                frame.replicas.uses(tensor, operands, name, where)

    def _check_written(
        self, name: str, tensor: torch.Tensor, before: Types, after: Types, where: str
    ) -> None:
        """Views of what was written to keep their type, so it may not change."""
        for axis in self._frame.axes:
            old, new = before[axis.key], after[axis.key]
            if old == new or (old in (CONSTANT, "V") and tensor._base is None):
                continue
            raise self._frame.fail(
                f"{name} to leave its first input {old} over {axis}",
                f"{new} at {where}",
                "Write it out of place, or convert the first input before.",
            )

    # Errors.

    def _no_rule(self, func: Callable[..., Any], name: str) -> ReplicationError:
        return self._frame.fail(
            f"a replication rule for {name}",
            f"none at {line()}",
            f"If it does not communicate, write: "
            f'lowtide.spmd.register_rule("{name}", lowtide.spmd.LOCAL)',
        )

    def _no_rule_for_function(self, function: type) -> ReplicationError:
        return self._frame.fail(
            f"a replication rule for the autograd function {function.__name__}",
            f"none at {line()}",
            f"If it does not communicate, write: "
            f"lowtide.spmd.register_rule({function.__qualname__}, lowtide.spmd.LOCAL)",
        )

    def call_function(
        self,
        function: type,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        name = rules.function_name(function)
        rule = _C.find_rule(name)
        assert rule is not None
        with self._frame.paused():
            return self._typed(name, rule, args, kwargs, plain)


def _call_in_region(
    function: type,
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    frame = current()
    if frame is None or not frame.looks:
        return plain(*args, **kwargs)
    return Checker(frame).call_function(function, plain, args, kwargs)


rules.apply_function = _call_in_region


def _is_of_a_mesh(caller: FrameType) -> bool:
    """A mesh keeps its ranks in tensors; `mesh["tp"]` is no work of a region."""
    files = (device_mesh.__file__, _mesh_layout.__file__)
    return caller.f_code.co_filename in files


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from tensors_in(element)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def describe(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}"


def _way(have: str, want: str, axis: Axis) -> str:
    """How to get from one type to the other."""
    found: Iterable[str] = [
        f"spmd.{name}(y, {axis}, src={have}, dst={want})"
        for (name, src, dst), _ in rules.transitions()
        if (src.value, dst.value) == (have, want)
    ]
    text = " or ".join(found)
    return f"Write {text}, or declare {have}." if text else f"Declare {have}."
