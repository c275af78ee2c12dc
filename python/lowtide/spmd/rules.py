"""Rules of operators, and which rule a call falls under."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from lowtide import _C
from lowtide.spmd.types import Type

Rule = _C.ReplicationRule
Operator = (
    "str | OpOverload | OpOverloadPacket | CustomOpDef | type[torch.autograd.Function]"
)

LOCAL = _C.RULE_LOCAL
LINEAR = _C.RULE_LINEAR
MULTILINEAR = _C.RULE_MULTILINEAR


def COLLECTIVE(src: Type, dst: Type) -> Rule:
    """Communicates: its first tensor input goes from ``src`` to ``dst``, and its
    backward sends the collective that :func:`transitions` says."""
    return _C.rule_collective(src.value, dst.value)


def SAME_AS(index: int) -> Rule:
    """Its outputs are what its tensor input ``index`` is, on the author's word."""
    return _C.rule_same_as(index)


# Names of Python's operators and of aliases, as rules know them.
_ALIASES = {
    "__add__": "add",
    "__radd__": "add",
    "__iadd__": "add_",
    "__sub__": "sub",
    "__rsub__": "rsub",
    "__isub__": "sub_",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__imul__": "mul_",
    "__truediv__": "div",
    "__itruediv__": "div_",
    "__rtruediv__": "reciprocal",
    "__rdiv__": "reciprocal",
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "__pow__": "pow",
    "__rpow__": "pow",
    "__ipow__": "pow_",
    "__mod__": "remainder",
    "__rmod__": "remainder",
    "__floordiv__": "floor_divide",
    "__rfloordiv__": "floor_divide",
    "__neg__": "neg",
    "__pos__": "positive",
    "__abs__": "abs",
    "__invert__": "bitwise_not",
    "__and__": "bitwise_and",
    "__rand__": "bitwise_and",
    "__or__": "bitwise_or",
    "__ror__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__rxor__": "bitwise_xor",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "__eq__": "eq",
    "__ne__": "ne",
    "__lt__": "lt",
    "__le__": "le",
    "__gt__": "gt",
    "__ge__": "ge",
    "__getitem__": "index",
    "__setitem__": "setitem",
}

# COLLECTIVE operators that name their axis; autograd functions that have a rule.
_axis_of: dict[str, str] = {}
registered_functions: set[type] = set()
registered: list[tuple[Any, Rule]] = []
# Told of every registration.
observers: list[Callable[[Any, Rule], None]] = []
# Calls `apply` of a registered autograd function inside a region.
apply_function: Callable[..., Any] | None = None


def register_rule(op: Any, rule: Rule, *, axis: str | None = None) -> None:
    """What the outputs of ``op`` are on each axis of a mesh, from what its inputs are.

    ``op`` is an operator overload, a packet, what ``torch.library.custom_op``
    returned, a ``torch.autograd.Function``, or a name: ``"my::gelu"``,
    ``"aten::dropout"``. ``axis`` names the axis a ``COLLECTIVE`` goes over if no
    argument of the call is its process group. Later rules replace earlier ones.
    """
    if not isinstance(rule, Rule):
        raise TypeError(
            f"lowtide: register_rule: expected a rule, got {rule!r}. Pass LOCAL, "
            f"LINEAR, MULTILINEAR, COLLECTIVE(src, dst) or SAME_AS(i)."
        )
    name = registered_name(op)
    _C.register_rule(name, rule)
    if axis is not None:
        _axis_of[name] = axis
    else:
        _axis_of.pop(name, None)
    if isinstance(op, type):
        _intercept(op)
    registered.append((op, rule))
    for observer in observers:
        observer(op, rule)


def registered_name(op: Any) -> str:
    if isinstance(op, str):
        if "::" not in op:
            raise ValueError(
                f"lowtide: register_rule: expected a name with its namespace, got "
                f"{op!r}. Write 'aten::{op}' for torch's own."
            )
        return op
    if isinstance(op, CustomOpDef):
        return op._qualname
    if isinstance(op, OpOverload):
        return op.name()
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name
    if isinstance(op, type) and issubclass(op, torch.autograd.Function):
        return function_name(op)
    raise TypeError(
        f"lowtide: register_rule: expected an operator, an autograd function or a "
        f"name, got {op!r}. Pass torch.ops.namespace.name, or 'namespace::name'."
    )


def function_name(function: type) -> str:
    """The name of an autograd function; never that of an operator."""
    return f"{function.__module__}.{function.__qualname__}"


def _intercept(function: type) -> None:
    """A region sees calls of a function that has a rule as one operator."""
    if function in registered_functions:
        return
    registered_functions.add(function)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # Looked up at the call: other checkers replace it.
        plain = super(function, cls).apply  # type: ignore[arg-type]
        if apply_function is None:
            return plain(*args, **kwargs)
        return apply_function(cls, plain, args, kwargs)

    function.apply = classmethod(apply)


def axis_of(name: str) -> str | None:
    return _axis_of.get(name) or _axis_of.get(name.partition(".")[0])


def call_name(func: Callable[..., Any]) -> str:
    """ "aten::add" for torch.add, Tensor.add and +; the names of operators."""
    if isinstance(func, OpOverload):
        return func.name()
    if isinstance(func, OpOverloadPacket):
        return func._qualified_op_name
    name = getattr(func, "__name__", "")
    if name == "__get__":
        owner = getattr(func, "__self__", None)
        name = getattr(owner, "__name__", "")
    return f"aten::{_ALIASES.get(name, name)}"


def rule_of(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Rule | None:
    rule = _C.find_rule(name)
    if rule is None and isinstance(func, OpOverloadPacket):
        overload = torch._C._jit_resolve_packet(name, *args, **kwargs)
        rule = _C.find_rule(f"{name}.{overload}")
    return rule


def transitions() -> list[tuple[tuple[str, Type, Type], tuple[str, Type, Type]]]:
    """Every typed collective and conversion, (name, src, dst), with its backward."""
    return [
        ((f, Type(a), Type(b)), (g, Type(c), Type(d)))
        for (f, a, b), (g, c, d) in _C.transitions()
    ]


def is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup)


def cpp_paths() -> tuple[str, str]:
    """(include directory, library) for extensions that register rules from C++:
    ``#include "spmd/register_rule.h"``, link ``liblowtide_core.so``."""
    package = sys.modules["lowtide"].__path__[0]
    return f"{package}/include", f"{package}/liblowtide_core.so"
