"""Operators and small functions for operator_dry_run: what they are called with."""

from support.operator_cases import copies, indexing, layers  # noqa: F401  add to CASES
from support.operator_cases.case import CASES, Make

__all__ = ["CASES", "Make"]
