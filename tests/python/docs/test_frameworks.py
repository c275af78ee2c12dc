"""The table of frameworks has the examples and versions that are tested, and what its
pages say to import is there."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PACKAGES = {"Lightning": "pytorch-lightning"}


def rows() -> list[list[str]]:
    lines = (DOCS / "frameworks.md").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("|---")) + 1
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_a_row_for_every_example():
    named = [re.findall(r"frameworks/(with_\w+\.py)", row[2]) for row in rows()]
    linked = {name for names in named for name in names}
    assert all(named)
    examples = (DOCS.parent / "examples/frameworks").glob("with_*.py")
    assert linked == {path.name for path in examples}


def test_rows_name_tests_that_are_there():
    tests = DOCS.parent / "tests/python"
    for *_, named in rows():
        files = re.findall(r"`([\w/]+\.py)`", named)
        assert files and ", ".join(f"`{file}`" for file in files) == named
        for file in files:
            assert (tests / ("" if "/" in file else "dist") / file).is_file(), file
    name = "test_runs_unedited_with_the_bits_of_fsdp2"
    assert f"`{name}`" in (DOCS / "frameworks.md").read_text()
    assert f"def {name}(" in (tests / "dist/test_framework_examples.py").read_text()


def test_versions_are_those_of_the_tests():
    tested: dict[str, list[str]] = {}
    for name, version, *_ in rows():
        tested.setdefault(re.findall(r"\w+", name)[0], []).extend(version.split(" or "))
    for package, versions in tested.items():
        if package == "verl":  # in a folder of its own
            pins = (DOCS.parent / "requirements/verl.txt").read_text()
            (installed,) = re.findall(r"^verl==([\d.]+)", pins, re.MULTILINE)
        else:
            installed = importlib.metadata.version(PACKAGES.get(package, package))
        assert any(f"{installed}.".startswith(f"{one}.") for one in versions), package


@pytest.mark.parametrize("page", sorted(DOCS.glob("frameworks/*.md")), ids=str)
def test_what_pages_import_is_there(page):
    text = page.read_text()
    assert page.name in (DOCS / "frameworks.md").read_text()
    imports = re.findall(r"^from (\S+) import (\w+)", text, re.MULTILINE)
    assert any(module.startswith("lowtide.") for module, _ in imports)
    for module, name in imports:
        if module.startswith("torchtitan"):  # looks for an accelerator when imported
            continue
        if module.endswith(".lightning"):
            import pytorch_lightning  # noqa: F401
        assert hasattr(importlib.import_module(module), name)
