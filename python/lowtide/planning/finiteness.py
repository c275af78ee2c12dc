"""A run without values is a finite one: ``isfinite`` reads back as true, ``isnan`` and
``isinf`` as false, and so does what programs derive from them before they read."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

Fact = bool | None  # what every element is; None: not known, so it is made up

_MADE = {
    "isfinite": True,
    **dict.fromkeys(("isnan", "isinf", "isposinf", "isneginf"), False),
}
_READS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist"}


def follow(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """``result`` of a torch function, or what is known of it if a number was read."""
    name = getattr(func, "__name__", "")
    if name in _READS:
        fact = fact_of(args[0])
        return result if fact is None else _filled(result, fact)
    operands = [*args, *kwargs.values()][:2] if name in _RULES else ()
    if isinstance(result, torch.Tensor) and any(map(_is_known, operands)):
        _learn(result, _RULES[name](operands))
    elif name in _MADE and result.device.type == "phantom":
        _learn(result, _MADE[name])
    elif name == "__setitem__":
        _forget(args[0])
    elif name.endswith("_") and not name.endswith("__"):  # returns what it wrote to
        _forget(result)
    return result


def _learn(tensor: Any, fact: Fact) -> None:
    if tensor.device.type == "phantom":
        tensor._lowtide_fact = fact
    elif fact is not None:
        with torch.no_grad():
            tensor.fill_(fact)


def _forget(written: Any) -> None:
    if isinstance(written, torch.Tensor) and fact_of(written) is not None:
        written._lowtide_fact = None


def fact_of(value: Any) -> Fact:
    """What every element of a tensor, or of all tensors of a list, is."""
    if isinstance(value, torch.Tensor):
        fact: Fact = getattr(value, "_lowtide_fact", None)
        return fact
    if isinstance(value, (list, tuple)):  # of torch.stack
        facts = {fact_of(item) for item in value}
        return facts.pop() if len(facts) == 1 else None
    return bool(value) if isinstance(value, (int, float)) and value in (0, 1) else None


def _is_known(value: Any) -> bool:
    return not isinstance(value, (int, float)) and fact_of(value) is not None


def _filled(result: Any, fact: bool) -> Any:
    if isinstance(result, list):
        return [_filled(item, fact) for item in result]
    return type(result)(fact)


# -- what follows --------------------------------------------------------------------


def _same(args: Sequence[Any]) -> Fact:
    return fact_of(args[0])


def _copied(args: Sequence[Any]) -> Fact:
    return fact_of(args[1])


def _no(args: Sequence[Any]) -> Fact:
    fact = fact_of(args[0])
    return None if fact is None else not fact


def _both(args: Sequence[Any]) -> Fact:
    facts = [fact_of(value) for value in args]
    if False in facts:
        return False
    return None if None in facts else True


def _either(args: Sequence[Any]) -> Fact:
    facts = [fact_of(value) for value in args]
    if True in facts:
        return True
    return None if None in facts else False


def _total(args: Sequence[Any]) -> Fact:
    """How many are true is known only if none is."""
    return False if fact_of(args[0]) is False else None


def _sum_of_two(args: Sequence[Any]) -> Fact:
    return False if all(fact_of(value) is False for value in args) else None


def _compared(compare: Callable[[Any, Any], bool]) -> Callable[[Sequence[Any]], Fact]:
    def rule(args: Sequence[Any]) -> Fact:
        left, right = (
            value if isinstance(value, (int, float)) else fact_of(value)
            for value in args
        )
        if left is None or right is None:
            return None
        return compare(left, right)

    return rule


_RULES: dict[str, Callable[[Sequence[Any]], Fact]] = {
    **dict.fromkeys(("logical_not", "logical_not_", "bitwise_not"), _no),
    "__invert__": _no,
    "copy_": _copied,
}
for _name in (
    *("all", "any", "amax", "amin", "max", "min", "mean", "__getitem__", "select"),
    *("clone", "detach", "contiguous", "to", "type", "cpu", "cuda", "stack", "cat"),
    *("bool", "int", "long", "float", "double", "half", "bfloat16", "flatten"),
    *("view", "reshape", "squeeze", "unsqueeze", "expand", "ravel"),
):
    _RULES[_name] = _same
for _names, _rule in (
    (("logical_and", "bitwise_and", "mul"), _both),
    (("logical_or", "bitwise_or", "maximum"), _either),
    (("sum", "count_nonzero"), _total),
    (("add",), _sum_of_two),
):
    for _name in _names:
        _RULES[_name] = _RULES[f"{_name}_"] = _rule
for _name, _rule in (
    ("and", _both),
    ("or", _either),
    ("mul", _both),
    ("add", _sum_of_two),
):
    for _form in (f"__{_name}__", f"__i{_name}__", f"__r{_name}__"):
        _RULES[_form] = _rule
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _RULES[_name] = _RULES[f"__{_name}__"] = _compared(getattr(operator, _name))
