"""`python -m lowtide plan` from the command line to its files."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from torch.cuda import _memory_viz

from lowtide.planning import Plan
from support import planned
from support.planned import TOPK

GIB = 1 << 30


def run(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lowtide", "plan", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """All outputs of one run."""
    directory = tmp_path_factory.mktemp("plan")
    done = run(
        *(planned.LLAMA, "--config", "tiny", "--sequence", "64"),
        *("--world", "4", "--rank", "1", "--device-memory", "80GiB"),
        *("--system", "fsdp2", "--allocator", "expandable"),
        *("--json", "plan.json", "--timeline", "line.png", "--snapshot", "s.pickle"),
        directory=directory,
    )
    assert done.returncode == 0, done.stderr
    return directory, done


def plan_in(directory: Path, name: str = "plan.json") -> Plan:
    return Plan.from_dict(json.loads((directory / name).read_text()))


def test_table_says_what_was_found(written):
    directory, done = written
    plan = plan_in(directory)
    out = " ".join(done.stdout.split())  # lines may be broken anywhere
    assert "rank 1 of 4, 3 steps" in out
    assert "fits into 80.0 GiB" in out
    assert "At the peak of allocated memory" in out
    assert "Peaks of the last step" in out
    assert "Largest tensors at the peak" in out
    for category in plan.by_category:
        assert category.replace("_", " ") in out
    assert "CUDA's context and NCCL's buffers come on top" in out


def test_json_has_everything(written):
    directory, _ = written
    raw = json.loads((directory / "plan.json").read_text())
    plan = plan_in(directory)
    assert plan.to_dict() == raw
    assert (plan.world, plan.rank, plan.device_memory) == (4, 1, 80 * GIB)
    assert plan.allocator["expandable"] is True
    assert raw["fragmentation"] == plan.peak_reserved - plan.peak_allocated
    assert sum(plan.by_category.values()) == plan.peak_allocated


def test_picture_is_a_png(written):
    directory, _ = written
    assert (directory / "line.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_snapshot_opens_in_torchs_tools(written):
    directory, _ = written
    snapshot = pickle.loads((directory / "s.pickle").read_bytes())
    page = _memory_viz.trace_plot(snapshot)
    assert "<html>" in page.lower() or "<script" in page
    allocations = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    owners = {entry["frames"][0]["filename"].split()[0] for entry in allocations}
    assert {"parameters", "optimizer_state", "activations"} <= owners
    files = {f["filename"] for entry in allocations for f in entry["frames"]}
    assert planned.LLAMA in files


def test_nothing_of_the_program_is_printed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "print('hello from the program', sys.argv[1:])\n"
        "w = torch.nn.Linear(8, 8).cuda()\n"
        "opt = torch.optim.SGD(w.parameters(), lr=1)\n"
        "while True:\n"
        "    w(torch.ones(1, 8).cuda()).sum().backward()\n"
        "    opt.step()\n"
    )
    done = run(
        *("--steps", "2", "--output", "log", "--timeline", "t.html"),
        *("--", "train.py", "--lr", "3"),
        directory=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "hello" not in done.stdout + done.stderr
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


def test_text_of_the_program_is_shown_as_it_is(tmp_path):
    """What rich would take for markup, and what the program prints."""
    (tmp_path / "[red]train.py").write_text(LIKE_MARKUP)
    done = run(
        *("--steps", "2", "--json", "p.json", "--", "[red]train.py"), directory=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "[red]train.py" in done.stdout
    assert 'text = "[/red]' in " ".join(done.stdout.split())
    assert done.stderr.strip() == "hello"
    (tmp_path / "p.json").unlink()
    # Written before anything that may fail is printed.
    with open("/dev/full", "w") as full:
        subprocess.run(
            [sys.executable, "-m", "lowtide", "plan", "--steps", "2", "--json"]
            + ["p.json", "--", "[red]train.py"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.DEVNULL,
        )
    assert plan_in(tmp_path, "p.json").steps == 2


def test_an_error_is_said_once(tmp_path):
    (tmp_path / "train.py").write_text("raise RuntimeError('went [/red] wrong')\n")
    done = run("--", "train.py", directory=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("lowtide: plan: expected the program to train") == 1
    assert done.stderr.count("went [/red] wrong") == 2  # and in the program's line


def test_too_small_a_device(tmp_path):
    done = run(
        *(planned.LLAMA, "--config", "bytes", "--sequence", "256"),
        *("--device-memory", "40MiB"),
        directory=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "does not fit into 40.0 MiB" in done.stdout


def test_allowed_operators_are_said(tmp_path):
    (tmp_path / "train.py").write_text(TOPK)
    done = run(
        *("--allow", "aten::topk", "--json", "p.json", "--", "train.py"),
        directory=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "p.json").read_text())["notes"] == [
        "of operators that were allowed only the outputs are counted, not what they "
        "take while they run: aten::topk"
    ]


@pytest.mark.parametrize(
    ("environment", "given", "expandable"),
    [
        ({}, [], False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, [], True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, [], True),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            ["--allocator", "large_segment_size_mb:40"],
            False,
        ),
    ],
)
def test_settings_of_the_allocator(
    tmp_path, monkeypatch, environment, given, expandable
):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(TOPK.replace(".topk(2)[0]", ""))
    done = run(*given, "--json", "plan.json", "--", "train.py", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = plan_in(tmp_path).allocator
    assert settings["expandable"] is expandable
    assert settings["large_segment"] == (40 << 20 if given else 20 << 20)


def test_a_module(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/sizes.py").write_text("WIDTH = 64\n")
    (tmp_path / "package/train.py").write_text(
        "import sys, torch\n"
        "from .sizes import WIDTH\n"
        "assert sys.argv[1:] == ['--lr', '3'], sys.argv\n"
        "w = torch.nn.Linear(WIDTH, 8).cuda()\n"
        "opt = torch.optim.SGD(w.parameters(), lr=1)\n"
        "while __name__ == '__main__':\n"
        "    w(torch.ones(1, WIDTH).cuda()).sum().backward()\n"
        "    opt.step()\n"
    )
    done = run("--", "-m", "package.train", "--lr", "3", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "-m package.train --lr 3" in done.stdout
