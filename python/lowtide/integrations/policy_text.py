"""An :class:`ActivationPolicy` in a command line's words."""

from __future__ import annotations

from typing import Any

from lowtide.policies import ActivationPolicy

_LISTS = ("save", "offload", "recompute")
_NUMBERS = ("min_bytes", "prefetch", "keep_last")
_MOST_DIGITS = 18
EXAMPLE = "offload=input;save=*.attn,mlp;keep_last=2"


def parse_policy(text: str) -> ActivationPolicy:
    """``EXAMPLE``: its fields, separated by semicolons, names by commas;
    ``recompute`` alone keeps nothing.

    Raises ValueError for what is no such text, and what the policy refuses.
    """
    if text.strip() == "recompute":
        return ActivationPolicy()
    settings: dict[str, Any] = {}
    for part in text.split(";"):
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if field in settings or not equals or not value:
            raise ValueError(_expected(text, f"got {part.strip()!r}"))
        if field in _LISTS:
            settings[field] = [name.strip() for name in value.split(",")]
        elif field in _NUMBERS and _is_number(value):
            settings[field] = int(value)
        else:
            raise ValueError(_expected(text, f"got {part.strip()!r}"))
    return ActivationPolicy(**settings)


def _is_number(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS


def _expected(text: str, got: str) -> str:
    return (
        f"lowtide: run: --policy: expected {', '.join(_LISTS)} with names or "
        f"{', '.join(_NUMBERS)} with a number, each once, as in '{EXAMPLE}', or "
        f"'recompute', {got} in {text!r}. Quote it for the shell."
    )
