"""`python -m lowtide run`: programs of FSDP2's as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.commands import ENVIRONMENT, one_agent

SCRIPTS = Path(__file__).parent / "scripts"
RUN = ("-m", "lowtide", "run")
REPORT = "lowtide memory on cpu (this rank)"
TIMEOUT_S = 120


def execute(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | ENVIRONMENT,
    )


def on_two_ranks(words: Sequence[str], folder: Path) -> tuple[list[str], str]:
    """What rank 0 prints, and what both say on the standard error."""
    folder.mkdir()
    done = execute([*one_agent(2), *words], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_script_of_fsdp2_runs_unedited_with_its_bits(tmp_path):
    """Six steps in bf16, a checkpoint, a model that resumes from it for three more."""
    script = str(SCRIPTS / "fsdp2_script.py")
    ends = (str(SCRIPTS / "leave_at_exit.py"), script, "checkpoint")
    theirs, _ = on_two_ranks(ends, tmp_path / "fsdp2")
    ours, said = on_two_ranks((*RUN, *ends), tmp_path / "lowtide")
    assert len(theirs) == 9 + 1
    assert ours == theirs
    lines = said.splitlines()
    bound = [line for line in lines if "fully_shard is lowtide's in" in line]
    assert len(bound) == 1  # on rank 0
    assert "torch.distributed.fsdp," in bound[0]
    assert "torch.distributed._composable.fsdp," in bound[0]
    # Of the model that was saved and of the one that resumed.
    assert lines.count("lowtide: run: Transformer") == lines.count(REPORT) == 2
    assert "has replaced" not in said


REPLACES = """
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

torch.distributed.init_process_group("gloo")
theirs = FSDPParam._init_sharded_param


def quantized(self, *args):
    return theirs(self, *args)


FSDPParam._init_sharded_param = quantized
FSDPModule.my_own = lambda self: 3
model = fully_shard(nn.Linear(4, 4))
FSDPParamGroup.is_sharded = property(lambda self: True)
FSDPModule.reshard = quantized
assert model.my_own() == 3
model(torch.ones(1, 4)).sum().backward()
torch.distributed.destroy_process_group()
"""


def test_methods_of_fsdp2_that_are_replaced_are_named(tmp_path):
    """Before the first unit and at the end, on rank 0; not one that lowtide's modules
    have from FSDP2's."""
    (tmp_path / "replaces.py").write_text(REPLACES)
    words = (*RUN, str(SCRIPTS / "leave_at_exit.py"), str(tmp_path / "replaces.py"))
    _, said = on_two_ranks(words, tmp_path / "lowtide")
    one = "FSDPParam._init_sharded_param (by __main__.quantized)"
    more = (
        f"{one}, FSDPParamGroup.is_sharded (by __main__.<lambda>), "
        "FSDPModule.reshard (by __main__.quantized)"
    )
    assert [line for line in said.splitlines() if "has replaced" in line] == [
        f"lowtide: run: the program has replaced {methods}. lowtide does not call "
        "these methods of FSDP2's: what they do is left out. Compare with a run "
        "without lowtide."
        for methods in (one, more)
    ]


@pytest.mark.slow
def test_a_policy_is_the_blocks_and_leaves_the_bits(tmp_path):
    script = str(SCRIPTS / "fsdp2_script.py")
    ends = (str(SCRIPTS / "leave_at_exit.py"), script, "checkpoint")
    theirs, _ = on_two_ranks(ends, tmp_path / "fsdp2")
    policy = ("--policy", "offload=input; save=attention", "--all-or-nothing")
    ours, said = on_two_ranks((*RUN, *policy, *ends), tmp_path / "lowtide")
    assert ours == theirs
    assert said.count("activations of 3 checkpointed modules") == 2
    assert re.search(r"^attention +save +\d+", said, re.MULTILINE)
    assert re.search(r"^input +offload +\d+", said, re.MULTILINE)
    # One is torch's own, which gives the optimizer that resumes its states.
    assert (
        "lowtide: run: --all-or-nothing: 10 optimizer steps happened; 0 were undone; 0 "
        "ran again for want of memory\n" in said
    )


@pytest.mark.slow
def test_logits_of_a_script_are_deferred_as_by_hand(tmp_path):
    """Its losses are taken outside of the model's forward; at its end it sums logits
    that somebody has to make."""
    leave = str(SCRIPTS / "leave_at_exit.py")
    script = (SCRIPTS / "fsdp2_script.py").read_text()
    by_hand = script.replace("torch.distributed.fsdp import", "lowtide import").replace(
        "    fully_shard(model, **kwargs)\n",
        "    fully_shard(model.head, **kwargs)\n    fully_shard(model, **kwargs)\n"
        "    from lowtide.losses import defer_logits\n    defer_logits(model.head)\n",
    )
    assert by_hand.count("defer_logits") == 2
    (tmp_path / "by_hand.py").write_text(by_hand)
    hand, _ = on_two_ranks((leave, "../by_hand.py", "ck"), tmp_path / "hand")
    option = (*RUN, "--defer-logits", leave, str(SCRIPTS / "fsdp2_script.py"), "ck")
    ours, said = on_two_ranks(option, tmp_path / "run")
    assert len(hand) == 9 + 1 and ours == hand
    heads = [line for line in said.splitlines() if "--defer-logits: Trans" in line]
    assert heads == [
        *2
        * [
            "lowtide: run: --defer-logits: Transformer.head, 24 to 67, gathered whole "
            "for its loss; logits are made where something other than a cross entropy "
            "asks"
        ],
        "lowtide: run: --defer-logits: Transformer.head: 12 calls, 12 losses without "
        "logits, logits made 0 times",
        "lowtide: run: --defer-logits: Transformer.head: 7 calls, 6 losses without "
        "logits, logits made 1 time: torch.Tensor.double (1)",
    ]


CHILDREN = """
import sys, tempfile
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed._composable.fsdp import fully_shard, FSDPModule


def work(rank, store):
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert isinstance(fully_shard(model), FSDPModule)
    assert type(model).__mro__[1].__module__.startswith("lowtide."), type(model).__mro__
    model(torch.ones(2, 4)).sum().backward()
    batches = torch.utils.data.DataLoader(
        [1, 2], num_workers=1, multiprocessing_context="spawn"
    )
    assert [batch.item() for batch in batches] == [1, 2]
    assert sys.argv == ["train.py", "a", "--", "b"], sys.argv
    if rank == 0:
        print("trained in", __name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    store = tempfile.mktemp()
    mp.start_processes(work, (store,), nprocs=2, start_method=sys.argv.pop())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_processes_that_the_program_starts_are_bound_too(tmp_path, how):
    (tmp_path / "train.py").write_text(CHILDREN)
    words = (*RUN, "train.py", "a", "--", "b", how)
    done = execute([sys.executable, *words], tmp_path)
    assert done.returncode == 0, done.stderr
    main = {"spawn": "__mp_main__", "fork": "__main__"}[how]
    assert done.stdout == f"trained in {main}\n"
    assert done.stderr.count(REPORT) == 1  # rank 0 of the group, not the parent
    assert done.stderr.count("fully_shard is lowtide's in") == 1


ENDING = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
whole = fully_shard(nn.Sequential(nn.Linear(4, 4)))
broken = fully_shard(nn.Sequential(nn.Linear(4, 4)))
for model in (whole, broken):
    model(torch.ones(2, 4)).sum().backward()
fully_shard.state(broken).device = "one that answers no more"
dist.destroy_process_group()
if sys.argv[1] == "raise":
    raise RuntimeError("its own")
sys.exit({"status": 3, "well": None}[sys.argv[1]])
"""
ENDS = {"raise": 1, "status": 3, "well": 0}


def test_every_end_has_a_report_that_does_not_hide_it(tmp_path):
    """Of a model that has none, too."""
    (tmp_path / "train.py").write_text(ENDING)
    commands = {end: [sys.executable, *RUN, "train.py", end] for end in ENDS}
    with ThreadPoolExecutor(2) as pool:
        done = {
            end: pool.submit(execute, command, tmp_path)
            for end, command in commands.items()
        }
    said = {end: run.result().stderr for end, run in done.items()}
    assert {end: run.result().returncode for end, run in done.items()} == ENDS, said
    for text in said.values():
        assert text.count(REPORT) == 1
        assert (
            "\nlowtide: run: Sequential: expected a report of its memory, got "
            "AttributeError(" in text
        )
    lines = said["raise"].splitlines()
    assert lines[-1].endswith("RuntimeError: its own")
    assert said["raise"].count("Traceback") == 1
    assert "Traceback" not in said["status"] + said["well"]


def test_a_policy_that_no_model_got_is_an_error_of_sys_exit_too(tmp_path):
    """A model that never ran forward has no blocks yet."""
    trained = "for model in (whole, broken):\n    model(torch.ones(2, 4))"
    assert trained in ENDING
    (tmp_path / "train.py").write_text(ENDING.replace(trained, "if 0:\n    model()"))
    words = (*RUN, "--policy", "recompute", "train.py", "well")
    done = execute([sys.executable, *words], tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "lowtide: run: --policy: expected a model that ran a forward, got none that "
    )


HIDDEN = """
import functools, sys
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate

# As who made it before lowtide was there.
from lowtide.integrations.binding import _of_torch
shard = functools.partial(_of_torch, reshard_after_forward=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
replicate(nn.Linear(4, 4))  # has a state like it, and is none
print("replicated", flush=True)
shard(nn.Linear(4, 4))
print("sharded", flush=True)
"""


def test_a_function_of_torchs_that_was_hidden_is_refused(tmp_path):
    (tmp_path / "train.py").write_text(HIDDEN)
    done = execute([sys.executable, *RUN, "train.py"], tmp_path)
    assert (done.returncode, done.stdout) == (1, "replicated\n"), done.stderr
    assert (
        "ValueError: lowtide: run: fully_shard: expected lowtide's, got torch's own "
        "for Linear. It was hidden, in a partial, a closure or a class, before lowtide "
        "was there: take it from torch.distributed.fsdp, or from lowtide, where it is "
        "called." in done.stderr
    )
