"""Programs that do not end by themselves: which line they were in, what is said of it,
and that nothing of them runs on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lowtide
from lowtide import cli
from lowtide.phantom.dry import ends
from lowtide.planning import PlanError
from support.planned import plan_text

# Holds a lock in a process that it starts, then waits for what never comes.
HANGS = """
import fcntl, subprocess, sys, threading
import torch
held = open("lock", "w")
fcntl.flock(held, fcntl.LOCK_EX)
wait = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", wait], pass_fds=[held.fileno()])

def train():
    loss = torch.ones((), device="cuda").exp()
    while loss.item() > 0:
        threading.Event().wait(600)

train()
"""
# Seconds: a busy machine takes some to start torch.
LIMIT = "30"
AT_LIMIT = (
    "expected {} to end within --limit {} seconds, got one that is still running at "
    "{}:12 in train. Give it fewer steps in its own arguments or a longer --limit. A "
    "loop that waits for a value of the GPU never ends, for those read as 1, False or "
    "finite."
)
CRASHES = """
import ctypes

def look_at_device_memory():
    ctypes.string_at(8)

look_at_device_memory()
"""


def phantom(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "lowtide", "phantom", *options, "--", "train.py"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200
    )


def is_released(lock: Path) -> bool:
    done = subprocess.run(["flock", "--nonblock", str(lock), "true"])
    return done.returncode == 0


@pytest.mark.slow
def test_a_program_that_hangs_is_ended_at_its_limit(tmp_path):
    done = phantom(tmp_path, HANGS, "--limit", LIMIT)
    wanted = AT_LIMIT.format("train.py", LIMIT, "train.py")
    assert done.stderr.splitlines()[-1] == f"lowtide: phantom: {wanted}"
    assert done.returncode == ends.EXPIRED
    assert is_released(tmp_path / "lock")


@pytest.mark.slow
def test_each_rank_has_the_limit(tmp_path):
    done = phantom(tmp_path, HANGS, "--limit", LIMIT, "--world", "4", "--ranks", "3")
    wanted = AT_LIMIT.format("train.py", LIMIT, "train.py")
    assert done.stderr.splitlines()[-1] == f"lowtide: phantom: rank 3: {wanted}"
    assert done.returncode == 1


@pytest.mark.slow
def test_a_plan_that_hangs_is_ended_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as raised:
        plan_text(tmp_path, HANGS, limit=float(LIMIT))
    path = tmp_path / "train.py"
    assert str(raised.value) == f"lowtide: plan: {AT_LIMIT.format(path, LIMIT, path)}"
    assert is_released(tmp_path / "lock")


def test_a_program_that_ends_within_its_limit(tmp_path):
    done = phantom(tmp_path, "print('done')\nraise SystemExit(3)", "--limit", "100")
    assert (done.returncode, done.stdout, done.stderr) == (3, "done\n", "")


def test_a_crash_names_its_signal_and_line(tmp_path):
    done = phantom(tmp_path, CRASHES)
    assert done.returncode == 128 + 11
    assert done.stderr == (
        "lowtide: phantom: expected train.py to end by itself, got signal SIGSEGV at "
        "train.py:5 in look_at_device_memory. If it left CUDA's API (custom kernels "
        "that the host looks into, other drivers), it can not run dry.\n"
    )


def test_a_crash_of_a_plan_names_its_line(tmp_path):
    with pytest.raises(PlanError) as raised:
        plan_text(tmp_path, CRASHES)
    line = f"{tmp_path / 'train.py'}:5 in look_at_device_memory"
    assert f"got its end with status -11 at {line}. A negative" in str(raised.value)


SECONDS, SHARE = "seconds above 0", "a share of all elements, 0 to 1"


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        *(("limit", text, SECONDS) for text in ("0", "-1", "soon")),
        *(("nonzero", text, SHARE) for text in ("1.5", "-0.1", "nan", "all")),
    ],
)
def test_numbers_that_are_none(option, text, expected, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["phantom", f"--{option}={text}", "x.py"])
    assert raised.value.code == 2
    assert f"expected {expected}, got '{text}'" in capsys.readouterr().err


def test_a_share_of_a_plan_that_is_none():
    with pytest.raises(ValueError, match="nonzero: expected a share .* got 2"):
        lowtide.plan(dict, print, nonzero=2)
