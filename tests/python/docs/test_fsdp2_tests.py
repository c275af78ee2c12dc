"""The table of PyTorch's tests names tests, programs and cases that are here."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parents[1] / "docs/design/fsdp2_tests.md"
FILE = re.compile(r"(?:\w+/)?test_\w+\.py")


def named() -> list[tuple[str, list[str]]]:
    """Every file that stands in the last column, with the names in its parentheses."""
    found = []
    for row in PAGE.read_text().splitlines():
        if not row.startswith("|"):
            continue
        here = row.strip("|").split("|")[-1]
        for match in re.finditer(rf"`({FILE.pattern})`(?: \(([^)]*)\))?", here):
            names = re.findall(r"`(\w+)`", match.group(2) or "")
            found.append((match.group(1), names))
    return found


def test_the_tests_it_names_are_here():
    places = named()
    assert len({file for file, _ in places}) > 50
    missing = []
    for file, names in places:
        path = TESTS / (file if "/" in file else f"dist/{file}")
        if not path.is_file():
            missing.append(file)
            continue
        words = set(re.findall(r"\w+", path.read_text()))
        missing += [f"{file}: {name}" for name in names if name not in words]
    assert missing == []


def test_no_file_stands_outside_of_what_is_looked_at():
    text = PAGE.read_text()
    assert len(FILE.findall(text)) == len(named())
