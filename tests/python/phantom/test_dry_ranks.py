"""``--ranks``: several ranks of a world, each dry in a process of its own, and whether
they would wait for each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide._torch_version import VERSION
from lowtide.phantom.dry import ranks

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "train_ranks.py"


def lowtide(command: str, *words: str, status: int = 0) -> tuple[str, str]:
    """What it printed, and on the standard error."""
    run = [sys.executable, "-W", "ignore", "-m", "lowtide", command, *map(str, words)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def compared(world: int, asked: str, *program: object, status: int = 0) -> Any:
    """{"ranks": {rank: report}, "nccl": verdict}"""
    options = f"--world {world} --ranks {asked} --json -".split()
    words = (*options, "--", *map(str, program))
    printed, _ = lowtide("phantom", *words, status=status)
    return json.loads(printed[printed.index("{\n") :])


def line_of(script: Path, text: str) -> str:
    """``file:number``"""
    lines = script.read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if text in line)
    return f"{script}:{number}"


STEP = line_of(TRAIN, "loss = model(")
BLOCK = line_of(TRAIN, "x = self.blocks[number](x)")
BACKWARD = line_of(TRAIN, "loss.backward()")


def divergence(found: Any) -> tuple[str, list[dict[str, Any] | None]]:
    """The difference and what each rank would call, of the only one."""
    (one,) = found["nccl"]["divergences"]
    entries = [side["entry"] for side in one["sides"]]
    return one["difference"], [entry and entry["call"] for entry in entries]


@pytest.mark.parametrize("system", ["fsdp2", "lowtide"])
def test_ranks_of_a_mesh_agree(system):
    """0 and 1 share what shards, 0 and 2 what replicates; 3 does not run."""
    found = compared(4, "0-2", TRAIN, system)
    assert found["nccl"]["divergences"] == []
    shared = {tuple(each["ranks"]) for each in found["ranks"]["0"]["communicators"]}
    assert {(0, 1), (0, 2)} <= shared
    assert found["nccl"]["communicators"] >= 3  # these and the world
    peaks = {each["devices"][0]["reserved"] for each in found["ranks"].values()}
    assert len(peaks) == 1


@pytest.mark.slow
def test_ranks_of_experts_over_a_mesh_of_their_own_agree():
    """0 and 1 exchange tokens, 0 and 2 have the same experts."""
    run = ("-m", "lowtide", "run", SCRIPTS / "train_experts.py")
    found = compared(4, "0-2", *run)
    assert found["nccl"]["divergences"] == []
    shared = {tuple(each["ranks"]) for each in found["ranks"]["0"]["communicators"]}
    assert {(0, 1), (0, 2), (0, 1, 2, 3)} <= shared


@pytest.mark.slow
def test_a_call_has_its_unit_and_the_line_it_was_made_for():
    calls = compared(2, "0", TRAIN, "fsdp2")["ranks"]["0"]["calls"]
    gathers = [call for call in calls if call["kind"] == "all_gather"]
    root, first, *_, last = gathers
    assert (root["where"], root["range"]) == (STEP, "FSDP::all_gather")
    assert (first["where"], first["node"]) == (BLOCK, "")
    assert first["range"] == "FSDP::all_gather (blocks.0)"
    assert last["range"] == "FSDP::all_gather (blocks.0)"
    assert last["where"] == BACKWARD
    assert last["node"]  # autograd's, on its thread
    (reduce,) = {c["where"] for c in calls if c["kind"] == "reduce_scatter"}
    assert reduce == BACKWARD


@pytest.mark.slow
def test_ddp_agrees():
    found = compared(2, "0,1", TRAIN, "ddp")
    assert found["nccl"]["divergences"] == []
    assert found["nccl"]["calls"] > 6


@pytest.mark.slow
def test_units_of_fsdp2_in_another_order():
    found = compared(2, "0,1", TRAIN, "fsdp2", "order", status=1)
    difference, calls = divergence(found)
    assert difference == "calls"
    assert [(call["range"], call["where"]) for call in calls] == [
        ("FSDP::all_gather (blocks.0)", BLOCK),
        ("FSDP::all_gather (blocks.1)", BLOCK),
    ]


@pytest.mark.slow
def test_units_of_lowtide_in_another_order():
    """In its first forward lowtide gathers in the order of the modules."""
    found = compared(4, "0,1", TRAIN, "lowtide", "order", status=1)
    difference, calls = divergence(found)
    assert difference == "calls"
    assert [(call["range"], call["where"]) for call in calls] == [
        ("lowtide::gather (blocks.1)", BACKWARD),
        ("lowtide::gather (blocks.0)", BACKWARD),
    ]


@pytest.mark.slow
def test_units_of_one_size_in_another_order():
    """NCCL would send the bytes of one for those of the other."""
    found = compared(2, "0,1", TRAIN, "fsdp2", "equal", status=1)
    difference, calls = divergence(found)
    assert difference == "units"
    assert [call["range"][-10:] for call in calls] == ["(blocks.0)", "(blocks.1)"]


@pytest.mark.slow
def test_an_all_reduce_that_a_rank_leaves_out_when_its_data_is_odd():
    found = compared(2, "0,1", TRAIN, "fsdp2", "odd", status=1)
    difference, calls = divergence(found)
    assert difference == "calls"
    assert calls[0]["kind"] == "all_reduce"
    assert calls[0]["where"] == line_of(TRAIN, "dist.all_reduce(tokens)")
    assert (calls[1]["range"], calls[1]["where"]) == ("FSDP::all_gather", STEP)


@pytest.mark.slow
def test_the_stages_of_a_pipeline_agree():
    found = compared(2, "all", SCRIPTS / "train_pipeline.py")
    assert found["nccl"]["divergences"] == []
    kinds = [call["kind"] for call in found["ranks"]["1"]["calls"]]
    assert kinds.count("recv") > 8


@pytest.mark.slow
def test_all_ranks_have_each_others_objects():
    program = str(SCRIPTS / "exchange_objects.py")
    printed, said = lowtide("phantom", "--world", 2, "--ranks", "all", "--", program)
    assert json.loads(printed) == {
        "all_gather": ["of 0", "of 1"],
        "gather": ["of 0", "of 1"],
        "broadcast": ["of 1"],
        "scatter": ["for 0"],
        "gloo": 3,
    }
    # torch 2.15 makes NCCL's communicator with the group.
    made = int(VERSION >= (2, 15))
    assert f"calls agree ({5 + made} calls, {1 + made} communicators)\n" in said


@pytest.mark.slow
def test_a_rank_among_some_has_its_own_objects():
    program = str(SCRIPTS / "exchange_objects.py")
    printed, _ = lowtide("phantom", "--world", 3, "--ranks", "0,1", "--", program)
    found = json.loads(printed)
    assert found["all_gather"] == ["of 0"] * 3
    assert found["broadcast"] == [None]


@pytest.mark.slow
def test_a_rank_that_ends_before_an_exchange():
    program = (str(SCRIPTS / "exchange_objects.py"), "early")
    words = ("--world", 2, "--ranks", "all", "--", *program)
    _, said = lowtide("phantom", *words, status=1)
    assert (
        "lowtide: phantom: all_gather_object: expected rank 1 to come to it, too, got "
        "its end. Let every rank of the group exchange objects alike."
    ) in said
    number = 5 + int(VERSION >= (2, 15))
    what = f"rank 0, call {number}: all_gather_object on the group of ranks 0 and 1"
    assert what in said
    assert "rank 1: nothing more\n" in said
    assert (
        "lowtide: phantom: rank 0: expected the program to end with status 0, got 1."
    ) in said


@pytest.mark.slow
def test_plans_of_several_ranks(tmp_path):
    file = tmp_path / "plan.json"
    options = f"--world 4 --ranks 0,1,2 --json {file} --".split()
    printed, said = lowtide("plan", *options, str(TRAIN), "lowtide")
    found = json.loads(file.read_text())
    assert [plan["rank"] for plan in found["ranks"].values()] == [0, 1, 2]
    assert found["errors"] == {}
    nccl = found["nccl"]
    assert nccl["divergences"] == []
    counts = f"{nccl['calls']} calls, {nccl['communicators']} communicators"
    assert f"calls agree ({counts})" in printed
    assert "error" not in said


@pytest.mark.slow
def test_plans_of_ranks_that_would_wait_for_each_other():
    words = ("--world", 2, "--ranks", "0,1", "--", TRAIN, "fsdp2", "order")
    printed, said = lowtide("plan", *words, status=1)
    assert "calls differ (" in printed
    assert "in FSDP::all_gather (blocks.0), at " in said
    assert "in FSDP::all_gather (blocks.1), at " in said


def test_ranks_as_they_are_asked_for():
    assert ranks.parse("0,1,7", 8) == [0, 1, 7]
    assert ranks.parse("5, 0-2,1", 8) == [0, 1, 2, 5]
    assert ranks.parse("all", 3) == [0, 1, 2]


@pytest.mark.parametrize("text", ["", "8", "-1", "0-8", "first", "0,,1"])
def test_ranks_that_are_not_there(text):
    with pytest.raises(ValueError, match="ranks") as caught:
        ranks.parse(text, 8)
    assert str(caught.value) == (
        "lowtide: --ranks: expected ranks of the 8 of the world, as 0,1,7, 0-3 or all, "
        f"got {text!r}. Pass --world too."
    )


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("plan", "rank"),
        ("plan", "timeline"),
        ("plan", "verify"),
        ("phantom", "snapshot"),
    ],
)
def test_what_is_of_one_rank(command, option, tmp_path):
    values = {"rank": ["1"], "timeline": [str(tmp_path / "a.png")], "verify": []}
    given = [f"--{option}", *values.get(option, [str(tmp_path / "file")])]
    words = ["--world", "2", "--ranks", "0,1", *given]
    words += ["model.py"] if option == "verify" else ["--", str(TRAIN), "fsdp2"]
    _, said = lowtide(command, *words, status=1 if command == "plan" else 2)
    assert said == (
        f"lowtide: {command} --{option}: expected one rank, got --ranks. Leave one of "
        "the two out.\n"
    )


def test_comparing_what_ranks_did_never_makes_a_host_wait_for_its_device(tmp_path):
    """Both ranks run, so gloo is real."""
    script = SCRIPTS / "count_host_waits.py"
    lowtide("phantom", *"--world 2 --ranks 0-1 --".split(), str(script), str(tmp_path))
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["compares"]
        assert found["waits"][1:] == [0] * 5
