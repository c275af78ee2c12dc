"""What names the versions of torch that the tree is built for names the same ones, and
what names its oldest Python the same one."""

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


# The oldest Python, by who names it.
OLDEST = {
    "pyproject.toml": (
        r'requires-python = ">=([\d.]+)"',
        r'target-version = "py(\d+)"',
        r'python_version = "([\d.]+)"',
    ),
    "cmake/TorchFromPython.cmake": (
        r"find_package\(Python ([\d.]+) ",
        r"interpreter >= ([\d.]+),",
    ),
    "Makefile": (r"Python >= ([\d.]+)",),
    "README.md": (r"Python >= ([\d.]+)",),
    "docs/gpu_check.md": (r"Python >= ([\d.]+)",),
    "requirements/dev.txt": (r"Python ([\d.]+)\.$",),
    "tools/wheels.py": (r'PYTHONS = \("([\d.]+)",',),
}


def test_the_oldest_python_is_one_that_is_tried():
    said = {
        (file, pattern): re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
        for file, patterns in OLDEST.items()
        for pattern in patterns
    }
    oldest = {
        where: found and found[1].replace(".", "") for where, found in said.items()
    }
    assert set(oldest.values()) == {"311"}, oldest


# Each says the version to somebody; none goes by it.
SAYS = {"_version_check.py", "cli/env.py", "_sharding/fsdp_module.py"}
ASKS = re.compile(
    r"torch\.__version__|torch\.version\.__version__|TorchVersion|\bVERSION\b"
    # What this torch has, asked of it by name.
    r'|(get|has)attr\(_?(torch|dist|c10d|fully_shard)\b[^,]*, "'
)


def asking(folder: str, pattern: re.Pattern[str]) -> set[str]:
    root = ROOT / folder
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh"}
        if pattern.search(path.read_text())
    }


def test_one_module_and_one_header_ask_for_torchs_version():
    assert asking("python/lowtide", ASKS) - SAYS == {"_torch_version.py"}
    pattern = re.compile(r"TORCH_VERSION_|#\s*if.*TORCH_AT_LEAST")
    assert asking("csrc", pattern) == {"base/torch_version.h"}


def test_the_table_has_no_others():
    rows = re.findall(
        r"^\| (\d+)\.(\d+)\.\d+\S* \| 3",
        (ROOT / "docs/torch_versions.md").read_text(),
        re.M,
    )
    assert rows and set(map(tuple, (map(int, row) for row in rows))) <= set(MINORS)
