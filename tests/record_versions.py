"""Notes a green run of all tests in docs/torch_versions.md: `make test` ends with it.

    tests/record_versions.py FOLDER    with the XML of GoogleTest and pytest

One line a minor version of torch, the last run's, with the commit that was checked out,
"after" it where files differed from it; a run with a failure is refused.
"""

from __future__ import annotations

import datetime
import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "torch_versions.md"
TESTED = ("csrc", "python", "tests", "examples", "CMakeLists.txt", "cmake")


def main(folder: Path) -> None:
    import torch

    cpp = counts([path for path in folder.glob("*.xml") if path.stem != "python"])
    python = counts([folder / "python.xml"])
    today = datetime.datetime.now(datetime.UTC).date()
    cells = [
        torch.__version__,
        "{}.{}".format(*sys.version_info),
        str(today),
        commit(),
        *map(said, (cpp, python)),
    ]
    TABLE.write_text(with_line(TABLE.read_text(), "| " + " | ".join(cells) + " |"))


def commit() -> str:
    try:
        name = git("rev-parse", "--short", "HEAD")
        return f"after {name}" if git("status", "--porcelain", *TESTED) else name
    except (OSError, subprocess.CalledProcessError):
        return ""  # an sdist


def git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()


def counts(reports: list[Path]) -> tuple[int, int]:
    """(passed, skipped)"""
    ran = skipped = 0
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                raise SystemExit(
                    f"lowtide: {report}: expected a run without failures, got one in "
                    f"{case.get('name')}. Run `make test` again."
                )
            left_out = (
                case.get("status") == "notrun" or case.find("skipped") is not None
            )
            skipped += left_out
            ran += not left_out
    if not ran:
        raise SystemExit(
            f"lowtide: {TABLE.name}: expected the tests that were run, got none in "
            f"{[str(report) for report in reports]}. Run `make test`."
        )
    return ran, skipped


def said(count: tuple[int, int]) -> str:
    ran, skipped = count
    return f"{ran} passed" + (f", {skipped} skipped" if skipped else "")


def with_line(text: str, line: str) -> str:
    """With `line` in the first table, in the place of that of the same minor version;
    oldest version first."""
    lines = text.splitlines()
    begin = 1 + next(i for i, old in enumerate(lines) if old.startswith("|---"))
    runs = list(itertools.takewhile(lambda old: old.startswith("|"), lines[begin:]))
    kept = {minor(old): old for old in runs} | {minor(line): line}
    rows = [kept[version] for version in sorted(kept)]
    return "\n".join([*lines[:begin], *rows, *lines[begin + len(runs) :], ""])


def minor(line: str) -> tuple[int, int]:
    major, minor = re.match(r"\| (\d+)\.(\d+)", line).groups()
    return int(major), int(minor)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
