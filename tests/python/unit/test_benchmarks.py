"""The benchmarks' machinery: cases, JSON, tables, and one case that is quick."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import callgrind
import pytest
import results
import run as runner
import tables
from case import Case, Row
from cases import published

ROOT = Path(__file__).parents[3]
RUN = ROOT / "benchmarks" / "run.py"

ROWS = (
    Row("fake", "lowtide", "bytes", 1500, "B", "measured", "why it is so"),
    Row("fake", "fsdp2", "bytes", 3000, "B", "arithmetic"),
    Row("fake", "bound", "bytes", 2000, "B", "arithmetic"),
    Row("fake", "lowtide", "equal", True, "", "measured"),
    Row("fake", "lowtide", "time", None, "us", "missing", "no clock"),
)
FAKE = Case("fake", "One line.", "By hand.", lambda: ROWS, headlines=("bytes",))
ENVIRONMENT = {"torch": "2.11", "cores": 2}


@pytest.fixture
def result() -> results.Result:
    return results.of(FAKE, FAKE.rows(), ENVIRONMENT)


def test_list_names_every_case() -> None:
    run = subprocess.run(
        [sys.executable, str(RUN), "--list"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    listed = [line.split()[0] for line in run.stdout.splitlines()]
    files = {path.stem for path in (RUN.parent / "cases").glob("[!_]*.py")}
    assert listed == list(runner.CASES)
    assert set(listed) == files
    assert "only by name" in run.stdout


def test_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["host_costs"])
    assert "got host_costs" in capsys.readouterr().err


def test_json_round_trip(result: results.Result, tmp_path: Path) -> None:
    path = results.write(result, tmp_path)
    assert path.name == "fake.json"
    assert results.read(path) == result
    assert json.loads(path.read_text())["command"] == "python benchmarks/run.py fake"
    assert results.read_all(tmp_path, ("other", "fake")) == [result]


def test_a_row_that_was_computed_again_differs_by_any_part(
    result: results.Result,
) -> None:
    assert results.differences(result, ROWS[:2]) == []
    other = replace(ROWS[0], value=1501)
    missing = replace(ROWS[0], quantity="more bytes")
    assert results.differences(result, (*ROWS, other, missing)) == [
        "lowtide, bytes: expected 1500 B (measured; why it is so), got 1501 B "
        "(measured; why it is so)",
        "lowtide, more bytes: expected no such row, got 1500 B (measured; why it is "
        "so)",
    ]


def test_every_part_of_a_case_has_its_turn() -> None:
    case = replace(FAKE, parts=dict.fromkeys("abc", lambda: ROWS))
    assert [case.part_in_turn(738_000 + turn) for turn in range(4)] == list("abca")


def test_what_is_simulated_can_be_computed_again_in_parts() -> None:
    for result in results.read_all(runner.RESULTS, runner.CASES):
        simulated = {row.quantity for row in result.rows if row.kind == "simulated"}
        assert bool(simulated) == bool(runner.load(result.case).parts), result.case


def test_equal_arguments_mean_one_run_on_one_machine() -> None:
    figure = published.FIGURES[0]
    other = replace(figure, ranks=2)
    published._Runs([figure, figure])
    with pytest.raises(ValueError, match="expected equal arguments on one machine"):
        published._Runs([figure, other])


def test_a_row_states_its_kind() -> None:
    with pytest.raises(ValueError, match="kind"):
        Row("fake", "lowtide", "bytes", 1, "B", "guessed")
    with pytest.raises(ValueError, match="missing"):
        Row("fake", "lowtide", "bytes", None, "B", "measured")


def test_headlines_put_lowtide_beside_fsdp2() -> None:
    result = results.of(FAKE, ROWS[:2], ENVIRONMENT)
    *_, row = tables.headlines([result]).splitlines()
    assert row == "| bytes, B | 1,500 | 3,000 | 0.50 | measured / arithmetic |"


def test_headlines_name_the_torch_of_older_figures() -> None:
    old, new = (
        results.of(FAKE, ROWS[:2], ENVIRONMENT | {"torch": torch})
        for torch in ("2.9.1+cu128", "2.11.0")
    )
    *_, first, second = tables.headlines([old, new]).splitlines()
    assert first.startswith("| bytes, torch 2.9, B | 1,500 | 3,000 |")
    assert second.startswith("| bytes, B | 1,500 | 3,000 |")


def test_a_case_with_other_systems_has_a_table_of_its_own(
    result: results.Result,
) -> None:
    first, _, row, *_ = tables.headlines([result]).splitlines()
    assert first == "| | lowtide | FSDP2 | bound | unit | kind |"
    assert row == "| bytes | 1,500 | 3,000 | 2,000 | B | measured, arithmetic |"


def test_section_has_every_row_and_note(result: results.Result) -> None:
    lines = list(tables.section(result))
    assert "| | lowtide | FSDP2 | bound | unit | kind |" in lines
    assert "| bytes | 1,500 (1) | 3,000 | 2,000 | B | measured, arithmetic |" in lines
    assert "| equal | yes |  |  |  | measured |" in lines
    assert "| time | - (2) |  |  | us | missing |" in lines
    assert "1. why it is so" in lines
    assert "2. no clock" in lines


def test_only_the_region_is_rewritten() -> None:
    text = f"a\n{tables.BEGIN}\nold\n{tables.END}\nb\n"
    new = tables.replace_region(text, "new")
    assert new == f"a\n{tables.BEGIN}\nnew\n{tables.END}\nb\n"
    with pytest.raises(ValueError, match="benchmarks:begin"):
        tables.replace_region("no region", "new")


def test_tables_are_those_of_the_stored_results(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    runner.write_tables(runner.RESULTS, tmp_path)
    assert readme.read_text() == (ROOT / "README.md").read_text()
    written = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert written == (ROOT / "docs" / "benchmarks.md").read_text()


def test_nothing_stored_names_a_machine() -> None:
    for path in runner.RESULTS.glob("*.json"):
        # Where public repositories are cloned from, and torch's name for a launcher.
        text = re.sub(r"https://github.com/\$|env://", "", path.read_text())
        found = re.search(r"""://|(?:^|[\s"'=(:])/\w""", text)
        assert found is None, (path, found)


PROFILE = """\
events: Ir
fn=(1) step
5 100
cfn=(2) c10d::FakeProcessGroup::allgather
calls=2 0
+3 70
cfn=(3) at::add
calls=1 0
* 20

fn=(2)
7 30
cfn=(4) c10d::FakeProcessGroup::checks()'2
calls=2 0
9 40

totals: 190
"""


def test_callgrind_counts_outermost_calls_of_a_class() -> None:
    lines = PROFILE.splitlines()
    assert callgrind.total(lines) == 190
    assert callgrind.inside(lines, "c10d::FakeProcessGroup::") == 70
    assert list(callgrind.calls(lines))[-1] == (
        "c10d::FakeProcessGroup::allgather",
        "c10d::FakeProcessGroup::checks()",
        40,
    )


def test_without_valgrind_the_result_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = runner.load("host_instructions")
    monkeypatch.setenv("PATH", "")
    (row,) = case.rows()
    assert row.kind == "missing" and "apt install valgrind" in row.note


@pytest.mark.slow
def test_flat_gradients_case() -> None:
    case = runner.load("case1_flat_gradients")
    values = {(r.system, r.quantity): r.value for r in case.rows()}
    for name in ("cat", "flat", "lowtide"):
        for what in ("losses", "gradients"):
            assert values[name, f"{what} equal per_parameter's bit for bit"] is True
    for name in ("flat", "lowtide"):
        saving = values[name, "less than cat"]
        assert isinstance(saving, float) and saving >= 0.12
