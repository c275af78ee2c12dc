"""`python -m lowtide plan` from the command line to its files."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch.cuda import _memory_viz

from lowtide.cli import main
from lowtide.planning import Plan, table
from support import planned

GIB = 1 << 30


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """All outputs of one run."""
    directory = tmp_path_factory.mktemp("plan")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lowtide", "plan"),
            *(planned.LLAMA, "--config", "tiny", "--sequence", "64"),
            *("--world", "4", "--rank", "1", "--gpu", "h200"),
            *("--device-memory", "40GiB", "--allocator", "expandable"),
            *("--system", "fsdp2", "--events", "at_sync", "--json", "plan.json"),
            *("--timeline", "line.png", "--snapshot", "s.pickle"),
        ],
        cwd=directory,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return directory, done


def plan_in(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "plan.json").read_text())
    return found


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned.plan_llama(config="tiny", sequence=64, device_memory=40 * GIB)


def test_table_says_what_was_found(written):
    directory, done = written
    out = " ".join(done.stdout.split())  # lines may be broken anywhere
    assert "rank 1 of 4, 3 steps" in out
    assert "fits into 40.0 GiB" in out
    assert "At the peak of allocated memory" in out
    assert "Peaks of the last step" in out
    assert "Largest tensors at the peak" in out
    for category in plan_in(directory)["by_category"]:
        assert category.replace("_", " ") in out
    assert "CUDA's context and kernels come on top" in out


def test_json_has_everything(written, plan):
    directory, _ = written
    found = plan_in(directory)
    assert found.keys() == plan.to_dict().keys()
    assert (found["world"], found["rank"]) == (4, 1)
    assert found["device_memory"] == 40 * GIB
    assert found["allocator"] == {
        "conf": "expandable_segments:True",
        "expandable": True,
        "events": "at_sync",
    }
    peaks = found["peak_reserved"], found["peak_allocated"]
    assert found["fragmentation"] == peaks[0] - peaks[1]
    assert sum(found["by_category"].values()) == peaks[1]


def test_picture_is_a_png(written):
    directory, _ = written
    assert (directory / "line.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_snapshot_opens_in_torchs_tools(written):
    directory, _ = written
    snapshot = pickle.loads((directory / "s.pickle").read_bytes())
    page = _memory_viz.trace_plot(snapshot)
    assert "<html>" in page.lower() or "<script" in page
    trace = snapshot["device_traces"][1]  # the rank's
    allocations = [entry for entry in trace if entry["action"] == "alloc"]
    owners = {entry["frames"][0]["filename"].split()[0] for entry in allocations}
    assert {"parameters", "optimizer_state", "activations"} <= owners
    files = {f["filename"] for entry in allocations for f in entry["frames"]}
    assert planned.LLAMA in files


def test_a_plan_that_does_not_fit_or_only_with_flushes(plan, capsys):
    for changed, text in (
        ({"fits": False}, "does not fit into 40.0 GiB"),
        ({"retries": 2}, "fits into 40.0 GiB, but the cache is flushed 2 times"),
    ):
        table.show(dataclasses.replace(plan, **changed), Console(width=200))
        assert text in capsys.readouterr().out


def test_a_note_is_shown_as_it_is(plan, capsys):
    note = "[/red] of [bold was skipped (train.py:3)"
    table.show(dataclasses.replace(plan, notes=[note]), Console(width=200))
    assert f"note: {note}\n" in capsys.readouterr().out


# -- what the program prints, and what looks like rich's markup ---------------------


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """(exit status, stdout, stderr) of the command in a folder of the test's own."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        status = main(["plan", *arguments])
        return status, *capfd.readouterr()

    return run


def test_nothing_of_a_module_is_printed(tmp_path, run):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/sizes.py").write_text("WIDTH = 64\n")
    (tmp_path / "package/train.py").write_text(
        "import sys, torch\n"
        "from .sizes import WIDTH\n"
        "print('hello from the program', sys.argv[1:])\n"
        "w = torch.nn.Linear(WIDTH, 8).cuda()\n"
        "opt = torch.optim.SGD(w.parameters(), lr=1)\n"
        "while __name__ == '__main__':\n"
        "    w(torch.ones(1, WIDTH).cuda()).sum().backward()\n"
        "    opt.step()\n"
    )
    status, out, error = run(
        *("--steps", "2", "--output", "log", "--timeline", "t.html"),
        *("--", "-m", "package.train", "--lr", "3"),
    )
    assert status == 0, error
    assert "-m package.train --lr 3" in out
    assert "hello" not in out + error
    log = (tmp_path / "log").read_text()
    assert log == "hello from the program ['--lr', '3']\n"
    page = (tmp_path / "t.html").read_text()
    assert "data:image/png;base64," in page


LIKE_MARKUP = """
import torch
print("hello", flush=True)
w = torch.nn.Linear(512, 512).cuda()
opt = torch.optim.SGD(w.parameters(), lr=1)
while True:
    loss = w(torch.ones(64, 512).cuda()).sum(); text = "[/red] [bold"
    loss.backward()
    opt.step()
"""


def test_text_of_the_program_is_shown_as_it_is(tmp_path, run):
    (tmp_path / "[red]train.py").write_text(LIKE_MARKUP)
    status, out, error = run("--steps", "2", "--", "[red]train.py")
    assert status == 0, error
    assert "[red]train.py" in out
    assert 'text = "[/red]' in " ".join(out.split())
    assert error.strip() == "hello"


def test_an_error_is_said_once(tmp_path, run):
    (tmp_path / "train.py").write_text("raise RuntimeError('went [/red] wrong')\n")
    status, _, error = run("--", "train.py")
    assert status == 1
    assert error.count("lowtide: plan: expected the program to train") == 1
    assert error.count("went [/red] wrong") == 2  # and in the program's line


def test_files_are_written_before_anything_that_may_fail_is_printed(
    tmp_path, run, monkeypatch
):
    def fail(plan: Plan) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(table, "show", fail)
    (tmp_path / "train.py").write_text(LIKE_MARKUP)
    with pytest.raises(OSError, match="No space left"):
        run("--steps", "1", "--json", "plan.json", "--", "train.py")
    assert plan_in(tmp_path)["steps"] == 1
