"""Builds, tests and measures lowtide on one NVIDIA GPU; see docs/gpu_check.md.

Steps that are done are kept: the same command goes on after an interruption. Exit: 0
all done and every bar met; 1 the build failed, or with no step left one failed, a bar
was missed, or GoogleTest or compute-sanitizer was not there; 2 something that is needed
is missing here; 3 steps are left, run it again; 128 + n ended by signal n.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
GPU = Path(__file__).resolve().parent
BENCHMARKS = GPU.parent
REPOSITORY = BENCHMARKS.parent
for directory in (GPU, BENCHMARKS, BENCHMARKS / "programs"):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))

import bars  # noqa: E402
import prerequisites  # noqa: E402
import processes  # noqa: E402
import results  # noqa: E402
import tables  # noqa: E402
from case import Row  # noqa: E402
from progress import OtherMachine, Outcome, Progress  # noqa: E402
from scale import FULL, TINY  # noqa: E402
from step import Step  # noqa: E402
from steps import steps  # noqa: E402

FINISHED, BAD, UNUSABLE, UNFINISHED = range(4)
HOW = """\
One GPU. Memory: rank 0 of 8 on torch's `fake` group, the highest of the third step.
Speed: one rank on NCCL, the systems step by step in turns in one process, events on the
GPU's stream. Columns of a line were taken in one run of this command."""


# The build itself puts headers into the package.
SOURCES = {
    "csrc": (".h", ".cpp", ".cu", ".cuh"),
    "python/lowtide": (".py",),
    "benchmarks": (".py",),
    "examples": (".py",),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="name the steps and stop")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps")
    parser.add_argument("--again", nargs="+", metavar="STEP", help="even if done")
    parser.add_argument("--fresh", action="store_true", help="forget what is done")
    parser.add_argument(
        "--budget",
        type=float,
        default=565,
        metavar="SECONDS",
        help="begin no step that would end later, 565 by default",
    )
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "out/gpu_check", metavar="DIR"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="sizes of a dry run: figures mean nothing"
    )
    return parser.parse_args(arguments)


def sources() -> str:
    """Changes with anything that is built or measured."""
    digest = hashlib.sha256()
    for folder, suffixes in SOURCES.items():
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix in suffixes and path.name != "_built_for.py":
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def rows_of_step(step: Step, progress: Progress, outcome: Outcome) -> list[Row]:
    figures = progress.figures(step.name)
    if figures is not None and "missing" not in figures:
        return list(step.rows(figures))
    if figures is not None:
        reason = figures["missing"]
        return [bars.row("lowtide", step.what, None, "", "missing", reason)]
    failed = outcome.failed.get(step.name)
    reason = f"failed: {ends(failed)}" if failed else "not run"
    return [bars.row("lowtide", step.what, None, "", "missing", reason)]


def ends(error: str) -> str:
    """What was done, and what became of it."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1])))


def report(rows: dict[str, list[Row]], facts: Any, folder: Path) -> str:
    """Writes all rows as JSON; returns and writes a table for each step."""
    result = results.Result(
        case=bars.NAME,
        describe="On one GPU, by `bash benchmarks/gpu_check.sh`.",
        how=HOW,
        headlines=(),
        command="bash benchmarks/gpu_check.sh",
        environment=facts,
        rows=tuple(row for of_step in rows.values() for row in of_step),
    )
    results.write(result, folder)
    lines = ["# gpu_check", "", HOW, tables.obtained_with(result)]
    for what, of_step in rows.items():
        lines += ["", f"## {what}", "", *tables.table(of_step)]
    text = "\n".join(lines)
    (folder / "gpu_check.md").write_text(text + "\n")
    return text


def write_errors(outcome: Outcome, folder: Path) -> None:
    """The whole ends of the output of steps that failed in this run."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = (f"{name}: {error}\n" for name, error in outcome.failed.items())
    (folder / "errors.txt").write_text("\n".join(texts))


def status(outcome: Outcome, missed: Sequence[str]) -> int:
    if "build" in outcome.failed:
        return BAD
    if outcome.left:
        return UNFINISHED
    return FINISHED if outcome.finished and not missed else BAD


def check(options: argparse.Namespace) -> int:
    all_steps = steps(TINY if options.tiny else FULL)
    names = [step.name for step in all_steps]
    if options.list:
        for step in all_steps:
            print(f"{step.name:<18}{step.seconds:>4} s  {step.what}")
        return FINISHED
    asked = {*(options.only or ()), *(options.again or ())}
    if unknown := sorted(asked - set(names)):
        print(
            f"lowtide: gpu_check: expected steps of {', '.join(names)}, got "
            f"{', '.join(unknown)}. See --list.",
            file=sys.stderr,
        )
        return UNUSABLE
    try:
        facts = prerequisites.check(any_gpu=options.tiny)
        stored = options.out / "steps.json"
        if options.fresh:
            stored.unlink(missing_ok=True)
        belongs = {"GPU": facts["GPU"], "torch": facts["torch"], "sources": sources()}
        progress = Progress(stored, belongs | {"tiny": options.tiny})
    except (prerequisites.Missing, OtherMachine) as error:
        print(error, file=sys.stderr)
        if isinstance(error, prerequisites.Missing):
            print(prerequisites.ALL, file=sys.stderr)
        return UNUSABLE
    for name in options.again or ():
        progress.forget(name)
    wanted = [step for step in all_steps if not options.only or step.name in asked]
    rows: dict[str, list[Row]] = {}

    def report_so_far(outcome: Outcome) -> str:
        for step in all_steps:
            rows[step.what] = rows_of_step(step, progress, outcome)
        write_errors(outcome, options.out)
        return report(rows, facts, options.out)

    outcome = progress.run(
        wanted, budget=options.budget, began=BEGAN, after=report_so_far
    )
    print(report_so_far(outcome))
    missed = bars.missed(row for of_step in rows.values() for row in of_step)
    for quantity in missed:
        print(f"bar missed: {quantity}")
    for name, error in outcome.failed.items():
        print(f"failed: {name}: {ends(error)}")
    for name in outcome.missing:
        print(f"not there: what {name} needs")
    if outcome.left:
        print(f"left for the next run: {', '.join(outcome.left)}")
    return status(outcome, missed)


if __name__ == "__main__":
    processes.end_all_on_signals()
    sys.exit(check(parse(None)))
