"""Runs benchmarks and keeps their figures.

    python benchmarks/run.py --list
    python benchmarks/run.py                      every case but the slow ones
    python benchmarks/run.py host_cost wire_bytes --tables

Each case leaves benchmarks/results/CASE.json and prints its table.  `--tables`
then rewrites the README's table and docs/benchmarks.md from the stored results;
alone, it runs nothing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent
# The cases share the tests' model and ranks; sys.path reaches the ranks too.
for directory in (BENCHMARKS, BENCHMARKS / "programs", REPOSITORY / "tests/python"):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))

import environment  # noqa: E402
import results  # noqa: E402
import tables  # noqa: E402
from case import Case  # noqa: E402

RESULTS = BENCHMARKS / "results"
# In the order of the tables.
CASES = (
    "memory_llama",
    "torch_versions",
    "time_llama",
    "live_bytes",
    "allocations",
    "case1_flat_gradients",
    "case2_residual_offload",
    "case2_full_scale",
    "case3_gather",
    "case4_replication",
    "wire_bytes",
    "host_cost",
    "host_instructions",
    "nccl_host_cost",
    "optimizer_step",
    "optimizer_in_backward",
    "step_cpu",
    "debugging",
    "import_time",
    "plan_cost",
    "peers",
    "published",
    "unedited_trainer",
    "configured_trainer",
    "experts",
    "experts_in_blocks",
    "sleeping",
    "foreign_scripts",
    "soak",
    "worlds",
)

DOCS_HEAD = """\
# Benchmarks

Every figure of [benchmarks/](../benchmarks), from the JSON files in
`benchmarks/results`, by `python benchmarks/run.py --tables`. *measured*: obtained by
running it, as the case says; *simulated*: run on
[torch's CUDA over a driver that computes nothing](design/phantom.md), the same every
time; *arithmetic*: computed from shapes; *published*: a figure of the report the case
comes from. What a GPU said is in [gpu_check.md](gpu_check.md) and nowhere here. Bytes
of published and foreign_scripts were obtained before the driver had a GPU's order of
addresses and cuDNN's workspace for attention: on default segments they are up to 2.4 %
off what they would be today, and where keys have fewer heads up to 2.2 %. Times were
taken on a small machine that others used at the same time: compare the columns of a
row, not rows of different days.

"""


def load(name: str) -> Case:
    case = importlib.import_module(f"cases.{name}").CASE
    assert isinstance(case, Case) and case.name == name
    return case


def run_case(case: Case, directory: Path) -> results.Result:
    before = environment.describe()
    result = results.of(case, case.rows(), before)
    results.write(result, directory)
    return result


def write_tables(directory: Path, repository: Path) -> None:
    stored = results.read_all(directory, CASES)
    readme = repository / "README.md"
    table = tables.headlines(stored)
    readme.write_text(tables.replace_region(readme.read_text(), table))
    text = DOCS_HEAD + tables.everything(stored)
    (repository / "docs" / "benchmarks.md").write_text(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument(
        "--json", type=Path, default=RESULTS, metavar="DIR", help="where JSON goes"
    )
    parser.add_argument("--tables", action="store_true", help="rewrite the tables")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.cases) - set(CASES)):
        parser.error(f"expected cases of {', '.join(CASES)}, got {', '.join(unknown)}")
    cases = [load(name) for name in options.cases or CASES]
    if options.list:
        for case in cases:
            by_name = f" [{case.only_by_name}]" if case.only_by_name else ""
            print(f"{case.name:<24}{case.describe}{by_name}")
        return
    if not options.cases:
        cases = [case for case in cases if not case.only_by_name]
        if options.tables:
            cases = []
    for case in cases:
        result = run_case(case, options.json)
        print("\n".join(tables.section(result)), flush=True)
    if options.tables:
        write_tables(options.json, REPOSITORY)


if __name__ == "__main__":
    main()
