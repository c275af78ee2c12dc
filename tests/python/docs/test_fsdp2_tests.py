"""The table of PyTorch's tests names tests that are here."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parents[1] / "docs/design/fsdp2_tests.md"


def test_the_tests_it_names_are_here():
    named = re.findall(r"`((?:\w+/)?test_\w+\.py)`", PAGE.read_text())
    assert len(named) > 40
    places = [name if "/" in name else f"dist/{name}" for name in named]
    assert [place for place in places if not (TESTS / place).is_file()] == []
