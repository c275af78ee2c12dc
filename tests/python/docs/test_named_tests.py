"""Every file of tests that a page names is here, in the folder it names if it does."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
FILE = re.compile(r"(?:\w+/)*test_\w+\.py\b")


def named() -> dict[str, set[str]]:
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return {
        page.relative_to(ROOT).as_posix(): set(FILE.findall(page.read_text()))
        for page in pages
    }


def test_files_that_pages_name_are_here():
    here = {path.relative_to(ROOT).as_posix() for path in TESTS.rglob("test_*.py")}
    missing = {
        (page, name)
        for page, names in named().items()
        for name in names
        if not any(f"/{path}".endswith(f"/{name}") for path in here)
    }
    assert sum(map(len, named().values())) > 100
    assert missing == set()
