"""Rules for the checker of the `spmd_types` package, if that is installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from lowtide import _C
from lowtide.spmd import rules
from lowtide.spmd.rules import LINEAR, LOCAL, MULTILINEAR, Rule

_exported: list[str] = []
_watching: list[bool] = []


def export_rules() -> list[str]:
    """Gives spmd_types the rules of registered operators and autograd functions, also
    of those registered later. Returns the names that it has now; COLLECTIVE and
    SAME_AS(i) exist there for autograd functions only.

    Raises ModuleNotFoundError if spmd_types is not installed.
    """
    importlib.import_module("spmd_types.checker")
    if not _watching:
        _watching.append(True)
        rules.observers.append(_export)
        for op, rule in rules.registered:
            _export(op, rule)
    return list(dict.fromkeys(_exported))


def _export(op: Any, rule: Rule) -> None:
    name = rules.registered_name(op)
    if isinstance(op, type):
        _export_function(op, rule)
    elif not _export_operator(op, name, rule):
        return
    _exported.append(name)


def _export_function(function: type, rule: Rule) -> None:
    spmd_types: Any = importlib.import_module("spmd_types")
    if rule == LOCAL:
        spmd_types.register_local_autograd_function(function)
        return

    def spmd_typecheck(outputs: Any, **inputs: Any) -> None:
        tensors = [t for t in inputs.values() if isinstance(t, torch.Tensor)]
        spmd_types.rules.ignore(*tensors)
        given = [spmd_types.get_local_type(t) for t in tensors]
        types = {
            axis: _infer(rule, [types[axis] for types in given], tensors, axis)
            for axis in given[0]
        }
        outs = outputs if isinstance(outputs, tuple) else (outputs,)
        for out in outs:
            spmd_types.assert_type(out, types)

    spmd_typecheck.__signature__ = _signature(function)
    function.spmd_typecheck = staticmethod(spmd_typecheck)


def _infer(rule: Rule, given: list[Any], tensors: list[torch.Tensor], axis: Any) -> Any:
    spmd_types: Any = importlib.import_module("spmd_types")
    operands = [
        (type_.value, t.requires_grad) for type_, t in zip(given, tensors, strict=True)
    ]
    found, expected, remedy = _C.infer_type(rule, operands, repr(axis))
    if not found:
        raise spmd_types.SpmdTypeError(f"{expected}; {remedy}")
    return getattr(spmd_types, found)


def _signature(function: type) -> Any:
    """``(outputs, *, name, ...)`` with the names of ``forward``, as the hook wants."""
    import inspect

    names = list(inspect.signature(function.forward).parameters)
    if names and names[0] == "ctx":
        names = names[1:]
    parameter = inspect.Parameter
    return inspect.Signature(
        [parameter("outputs", parameter.POSITIONAL_OR_KEYWORD)]
        + [parameter(name, parameter.KEYWORD_ONLY) for name in names]
    )


def _export_operator(op: Any, name: str, rule: Rule) -> bool:
    checker: Any = importlib.import_module("spmd_types._checker")
    kinds = {LINEAR: "LINEAR", MULTILINEAR: "MULTILINEAR"}
    if rule == LOCAL:
        return True  # what its checker assumes of operators it does not know
    if rule not in kinds:
        return False
    namespace, _, packet = name.partition(".")[0].partition("::")
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    target = getattr(getattr(torch.ops, namespace), packet)
    spec = checker._OpSpec(getattr(checker.OpLinearity, kinds[rule]), (0, 1, 2, 3))
    for key in (target, *(getattr(target, o) for o in target.overloads())):
        checker._OP_REGISTRY[key] = spec
    return True
