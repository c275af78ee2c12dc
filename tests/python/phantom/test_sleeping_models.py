"""A model that waits on the host holds nothing of the GPU, and is back when it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch import run

from lowtide._torch_version import VERSION
from lowtide.phantom.dry.launch import Machine

SLOW = pytest.mark.slow
SCRIPT = Path(__file__).parent / "scripts/sleep_and_wake.py"


def execute(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "lowtide", "phantom", "--world", "2", "--"),
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )


def figures(done: subprocess.CompletedProcess[str]) -> list[tuple[str, int]]:
    assert done.returncode == 0, done.stderr
    return [(what, int(n)) for what, n in map(str.split, done.stdout.splitlines())]


@pytest.mark.slow
def test_it_holds_what_fsdp2_holds_asleep():
    theirs = figures(execute(str(SCRIPT)))
    ours = figures(execute("-m", "lowtide", "run", str(SCRIPT)))
    names = ["trained", "asleep", "awake"]
    assert [what for what, _ in ours] == [*names, *names, "inferred"]
    asleep = {held for what, held in ours if what == "asleep"}
    assert asleep == {held for what, held in theirs if what == "asleep"}
    fused = figures(execute("-m", "lowtide", "run", str(SCRIPT), "fused"))
    assert {held for what, held in fused if what == "asleep"} == asleep
    # The shards in fp32 and two states of AdamW's.
    shards = 4 * (512 * 512 + 512) * 4 // 2
    assert {held - min(asleep) for what, held in ours if what == "awake"} <= set(
        range(3 * shards, 3 * shards + 65536)
    )


def test_what_is_dropped_holds_nothing_and_is_loaded_anew():
    """Also where what was loaded can not be looked at."""
    held = dict(figures(execute(str(SCRIPT.with_name("sleep_without_copies.py")))))
    shards = 4 * (1024 * 1024 + 1024) * 4 // 2
    assert held["asleep"] <= held["awake"] - 4 * shards  # and two states
    gone = held["awake"] - held["refilled"]
    assert shards <= gone < shards + 65536  # gradients


def test_a_forward_asleep_says_to_wake_it():
    done = execute("-m", "lowtide", "run", str(SCRIPT), "forget")
    assert done.returncode == 1
    assert (
        "RuntimeError: lowtide: unit '0': expected parameters on cuda:0, got "
        "0.0.weight on cpu, 0.0.bias on cpu. Call model.to('cuda') before the forward."
    ) in done.stderr
    # What it held is said all the same.
    assert "lowtide: run: Sequential\nlowtide memory on cuda:0 " in done.stderr
    assert (
        "planned: arithmetic, of this one, none of parameters that have left the device"
    ) in done.stderr


WORLD, WIDTH, LAYERS, STEPS = 8, 1024, 4, 2
MIB = 1 << 20
NUMEL = LAYERS * (8 * WIDTH * WIDTH + 2 * WIDTH)  # products and norms of the blocks
# Parameters and gradients, whole and as shards, in fp32; two states are like shards.
WHOLE, SHARDS = 4 * NUMEL, 4 * NUMEL // WORLD
# What a step of those below has beside its parameters: the accumulated gradients, the
# reduced ones, and two states.
HELD = [WHOLE, SHARDS, 2 * SHARDS] + [WHOLE + 2 * SHARDS, 3 * SHARDS, 2 * SHARDS]
# The program's input and a loss; before torch 2.15 two of cuBLAS's workspaces, too.
STAYS = MIB if VERSION >= (2, 15) else 65 * MIB
# What the allocator has around them: of expandable segments pages of 20 MiB.
AROUND = {False: 4 * MIB, True: 40 * MIB}


@pytest.mark.parametrize("expandable", [False, pytest.param(True, marks=SLOW)])
def test_reserved_memory_falls_to_nearly_nothing(monkeypatch, expandable):
    """And comes back as it was; host memory of the first step serves the second."""
    settings = f"expandable_segments:{expandable}"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    arguments = map(str, (WORLD, WIDTH, LAYERS, STEPS))
    program = ("sleep_and_wake.py", *arguments)
    naps = json.loads(run(*program, machine=Machine(world=WORLD), timeout=120))["naps"]
    assert len(naps) == len(HELD)
    for nap, held in zip(naps, HELD, strict=True):
        awake, asleep, woken = nap["awake"], nap["asleep"], nap["woken"]
        assert asleep["allocated"] <= STAYS
        assert asleep["reserved"] <= STAYS + AROUND[expandable]
        # Padding of the slabs and of blocks of the allocator aside.
        lent = awake["allocated"] - asleep["allocated"]
        assert SHARDS + held <= lent <= SHARDS + held + 4 * MIB
        assert woken["allocated"] == awake["allocated"]
        assert woken["page-locked"] == asleep["page-locked"] >= lent - 4 * MIB
    assert naps[4]["woken"]["page-locked"] == naps[-1]["woken"]["page-locked"]
