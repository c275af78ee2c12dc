"""Which gathers are done again in backward."""

from __future__ import annotations

import contextlib
import difflib
import threading
from collections.abc import Sequence
from typing import Any, Literal

import torch

from lowtide import _C

MIB = 1 << 20
MIN_BYTES = 32 * MIB
PREFETCH_BYTES = 256 * MIB


class _Active(threading.local):
    """What the innermost context decides. Plain values: compiled code is guarded on
    them."""

    # These are the instance's, since Dynamo would read those of the class.
    def __init__(self) -> None:
        self.inside = False
        self.every = False  # every name is listed
        self.names: tuple[str, ...] = ()
        self.min_bytes = 0
        self.prefetch_bytes = PREFETCH_BYTES
        self.seen: set[str] | None = None  # names of calls in the context


_RULES = ("inside", "every", "names", "min_bytes", "prefetch_bytes")
_active = _Active()
_names_in_compiled_code: set[str] = set()


class gather_policy(contextlib.ContextDecorator):
    """Around a forward: gathers whose name is listed, or all, keep their shard and
    are done again in backward, unless the call itself says otherwise.

    ``with gather_policy(regather=["attn_in", "ffn_in"], min_bytes=0): ...``

    Contexts nest; the innermost decides. Inside a checkpoint, and under any other
    saved-tensor hooks, these hold the gathered value: a recomputation has it anyway.

    Args:
        regather: Names, or ``"all"``.
        min_bytes: Gathered tensors with fewer bytes are kept. 32 MiB by default, 0 for
            every listed name. Sizes are the same on all ranks, so is the decision.
        prefetch_bytes: The gather for the site that backward reaches next is issued
            ahead of its use if it has at most so many bytes.

    Raises:
        ValueError: On leaving, for a listed name that no call inside had; at once for
            a setting out of range.
    """

    def __init__(
        self,
        regather: Sequence[str] | Literal["all"] = "all",
        *,
        min_bytes: int = MIN_BYTES,
        prefetch_bytes: int = PREFETCH_BYTES,
    ) -> None:
        names = _names(regather)
        self._rules = (True, names is None, names or (), min_bytes, prefetch_bytes)
        for setting, value in zip(_RULES[3:], self._rules[3:], strict=True):
            if not isinstance(value, int) or value < 0:
                raise ValueError(
                    f"lowtide: gather_policy.{setting}: expected an integer >= 0, got "
                    f"{value!r}. Leave it out for the default."
                )
        self._outer: list[tuple[tuple[Any, ...], set[str] | None, bool]] = []

    def __enter__(self) -> gather_policy:
        # Other hooks hold what is saved under them: ours would take it away.
        hooked = _C.active_gather_hooks() != "foreign"
        rules = tuple(getattr(_active, rule) for rule in _RULES)
        self._outer.append((rules, _active.seen, hooked))
        self._set(self._rules)
        _active.seen = set()
        if hooked:
            _C.push_gather_hooks()
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        seen = _active.seen or set()
        rules, _active.seen, hooked = self._outer.pop()
        self._set(rules)
        if hooked:
            _C.pop_gather_hooks()
        if _active.seen is not None:
            _active.seen |= seen
        if exc_type is None:
            _require_matches(self._rules[2], seen | _names_in_compiled_code)

    @staticmethod
    def _set(rules: tuple[Any, ...]) -> None:
        for rule, value in zip(_RULES, rules, strict=True):
            setattr(_active, rule, value)


def decide(name: str, num_bytes: int, regather: bool | None) -> bool:
    """Whether the gather called ``name``, of ``num_bytes``, is done again."""
    if not torch.is_grad_enabled():
        _note(name)
        return False
    if regather is not None:
        _note(name)
        return regather
    _note(name)
    listed = _active.every or name in _active.names
    return _active.inside and listed and num_bytes >= _active.min_bytes


def prefetch_bytes() -> int:
    return _active.prefetch_bytes


def _note(name: str) -> None:
    if torch.compiler.is_compiling():
        _note_compiled(name)
    elif _active.seen is not None:
        _active.seen.add(name)


def _note_compiled(name: str) -> None:
    """Called while Dynamo traces; leaves nothing in the graph."""
    _names_in_compiled_code.add(name)


# What torch._dynamo.assume_constant_result does, without importing it.
_note_compiled._dynamo_marked_constant = True


def _names(regather: Sequence[str] | str) -> tuple[str, ...] | None:
    if regather == "all":
        return None
    if isinstance(regather, str) or not all(
        isinstance(name, str) and name for name in regather
    ):
        raise ValueError(
            "lowtide: gather_policy.regather: expected a list of names or 'all', got "
            f"{regather!r}. Write regather=['attn_in']."
        )
    return tuple(regather)


def _require_matches(names: tuple[str, ...], seen: set[str]) -> None:
    for name in names:
        if name in seen:
            continue
        close = difflib.get_close_matches(name, sorted(seen), n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]!r}?" if close else f"Names: {sorted(seen)}."
        raise ValueError(
            f"lowtide: gather_policy.regather: expected {name!r} to name a gather in "
            f"the forward, got none. {hint}"
        )
