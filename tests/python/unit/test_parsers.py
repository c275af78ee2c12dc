"""Whatever a command line says: a value that its parser's rule gives, or our error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lowtide.phantom.dry import ranks
from lowtide.planning.report import gib, parse_bytes

WORLD = 12
# Texts that are almost right, beside any.
NEARLY = st.text(alphabet="0123456789.,-+eE_ KMGTiIbB", max_size=12)
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TB": 10**12, "GB": 10**9}


def value_or_message(parse: Callable[..., Any], *given: Any) -> Any:
    try:
        return parse(*given)
    except ValueError as error:
        return str(error)


@given(st.integers(1, 4000), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_sizes_are_numbers_of_units(number: int, unit: str, space: str) -> None:
    assert parse_bytes(f"{number}{space}{unit}") == number * UNITS[unit]
    assert parse_bytes(f" {number}{space}{unit.lower()} ") == number * UNITS[unit]


@given(st.integers(1 << 20, 1 << 45))
def test_what_is_shown_can_be_given(num_bytes: int) -> None:
    assert parse_bytes(gib(num_bytes)) == pytest.approx(num_bytes, rel=0.006)


@given(st.one_of(NEARLY, st.text()))
@example("infGiB")
@example("nanGiB")
def test_a_size_is_positive_or_refused(text: str) -> None:
    value = value_or_message(parse_bytes, text)
    if isinstance(value, str):
        assert value.startswith("lowtide: --device-memory: expected a size")
    else:
        assert value > 0


@given(st.lists(st.integers(0, WORLD - 1), min_size=1))
def test_ranks_are_those_that_are_listed(wanted: list[int]) -> None:
    assert ranks.parse(",".join(map(str, wanted)), WORLD) == sorted(set(wanted))


@given(st.integers(0, WORLD - 1), st.integers(0, WORLD - 1))
def test_a_range_of_ranks_has_both_ends(one: int, other: int) -> None:
    first, last = sorted((one, other))
    assert ranks.parse(f"{first}-{last}", WORLD) == list(range(first, last + 1))


@given(st.one_of(NEARLY, st.text()))
@example("0-99999999999999")
@example("0,5-3")
def test_ranks_are_of_the_world_or_refused(text: str) -> None:
    found = value_or_message(ranks.parse, text, WORLD)
    if isinstance(found, str):
        assert found.startswith("lowtide: --ranks: expected ranks of the 12")
    else:
        assert found and found == sorted(set(found))
        assert set(found) <= set(range(WORLD))
