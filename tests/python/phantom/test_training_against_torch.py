"""Sharded training: what torch's own CUDA operators and allocator reserve, and what the
phantom says.

The CUDA side is the installed torch, run dry over the dry driver
(csrc/phantom/driver, which says what it pretends): its
operators, FSDP2 and its allocator are the real ones, only kernels do nothing. The world
is torch's ``fake`` process group on both sides.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lowtide.phantom.histories import trace_of_cuda
from lowtide.phantom.traces import replay
from support import sharded_dry_run
from support.dry_cuda import run_dry
from support.phantom import Process
from support.ranks import RankPool
from support.sharded_dry_run import ShardedDryRun, train_dry

MEMORY = 80 << 30
CHECKPOINTED = ShardedDryRun()
PLAIN = ShardedDryRun(world=64, checkpointed=False, num_steps=2)
EXPANDABLE = {False: "", True: "expandable_segments:True"}


def train_on_cuda(
    run: ShardedDryRun, *, expandable: bool, events: str = "immediate"
) -> dict[str, Any]:
    printed = run_dry(
        [sharded_dry_run.__file__, json.dumps(dataclasses.asdict(run))],
        memory=MEMORY,
        events=events,
        conf=EXPANDABLE[expandable],
    )
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("events", ["immediate", "at_sync"])
@pytest.mark.parametrize("expandable", [False, True])
def test_model_replays_a_training_run_event_by_event(expandable, events):
    cuda = train_on_cuda(CHECKPOINTED, expandable=expandable, events=events)
    trace = trace_of_cuda(cuda["snapshot"])
    result = replay(trace)
    assert result.differences == []
    assert len(trace.operations) > 3000
    assert max(result.reserved) == cuda["reserved"][-1]
    assert max(result.allocated) == max(cuda["allocated"])


def train_on_phantom(run: ShardedDryRun) -> tuple[list[int], list[int]]:
    import lowtide.phantom

    lowtide.phantom.init_world(run.world)
    measured = train_dry("phantom", run)
    return measured.allocated, measured.reserved


@pytest.mark.parametrize("run", [CHECKPOINTED, PLAIN], ids=["checkpointed", "plain"])
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("system", ["fsdp2", "lowtide"])
def test_phantom_shows_the_peaks_of_cuda(system, expandable, run):
    run = dataclasses.replace(run, system=system)
    cuda = train_on_cuda(run, expandable=expandable)
    with RankPool(1, group=False) as pool:  # nothing cached yet, as on cuda
        phantom = Process(pool, "meta", {"expandable": expandable, "capacity": MEMORY})
        allocated, reserved = phantom.run(train_on_phantom, run)
    assert allocated == cuda["allocated"]
    # lowtide issues the same work through another runtime there, in another order.
    if system == "fsdp2":
        assert reserved == cuda["reserved"]
