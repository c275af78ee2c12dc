"""What names the versions of torch that the tree is built for names the same ones."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
(LISTED,) = re.findall(
    r"set\(LOWTIDE_TORCH_MINORS ([\d. ]+)\)",
    (ROOT / "cmake/TorchFromPython.cmake").read_text(),
)
MINORS = [tuple(map(int, minor.split("."))) for minor in LISTED.split()]


def test_one_range_without_gaps_is_what_packages_ask_for():
    (major, first), (_, last) = MINORS[0], MINORS[-1]
    assert MINORS == [(major, minor) for minor in range(first, last + 1)]
    asked = f'"torch>={major}.{first},<{major}.{last + 1}"'
    assert (ROOT / "pyproject.toml").read_text().count(asked) == 2


def test_each_has_its_pinned_packages():
    files = {f"torch-{major}.{minor}.txt" for major, minor in MINORS}
    folder = ROOT / "requirements"
    assert {path.name for path in folder.glob("torch-*.txt")} == files


@pytest.mark.parametrize("minor", MINORS)
def test_its_pins_are_of_that_version(minor):
    name = "{}.{}".format(*minor)
    pins = (ROOT / f"requirements/torch-{name}.txt").read_text().splitlines()
    assert any(re.fullmatch(rf"torch=={re.escape(name)}\.\d+", pin) for pin in pins)


def test_the_table_has_no_others():
    rows = re.findall(
        r"^\| (\d+)\.(\d+)\.\d+\S* \| 3",
        (ROOT / "docs/torch_versions.md").read_text(),
        re.M,
    )
    assert rows and set(map(tuple, (map(int, row) for row in rows))) <= set(MINORS)
