"""Numbers that the environment gives."""

import os

_MOST = 2**63 - 1


def number(variable: str, otherwise: int, *, least: int = 0) -> int:
    """Raises ValueError for what is none, or below ``least``."""
    text = os.environ.get(variable, "")
    if not text:
        return otherwise
    digits = text.strip()
    if digits.isascii() and digits.isdecimal() and len(digits) <= len(str(_MOST)):
        value = int(digits)
        if least <= value <= _MOST:
            return value
    raise ValueError(
        f"lowtide: {variable}: expected an integer >= {least}, got {text!r}. Unset it "
        f"for {otherwise}."
    )
