"""`lowtide plan --gpu` of programs that torchvision and transformers wrote most of."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lowtide.phantom.dry import launch
from lowtide.planning import Plan, plan_request
from lowtide.planning.request import Request, Script
from support import dry_programs


def plan_of(name: str) -> Plan:
    return plan_request(Request(Script(dry_programs.__file__, (name,)), gpu="h100"))


def unrecorded(name: str) -> dict[str, int]:
    """What `lowtide phantom` finds."""
    on = launch.Machine()
    done = subprocess.run(
        launch.command((dry_programs.__file__, name), on, launch.Settings()),
        env=launch.environment(on) | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])[name]
    return found


@pytest.mark.parametrize("name", ["resnet50", "hf_trainer", "top_k_experts"])
def test_recording_changes_nothing_and_explains_everything(name):
    plan, alone = plan_of(name), unrecorded(name)
    assert plan.peak_allocated == alone["allocated"]
    assert plan.peak_reserved == alone["reserved"]
    assert sum(plan.by_category.values()) == plan.peak_allocated
    # A block may be up to 1 MiB more than its tensor: too little to be split off.
    held, states = (plan.by_category[of] for of in ("parameters", "optimizer_state"))
    if name == "resnet50":  # its program tells weights and momenta together
        assert 1 <= (held + states) / alone["state"] < 1.04
    else:
        assert 1 <= held / alone["parameters"] < 1.01
        assert 2 <= states / alone["parameters"] < 2.04
    assert plan.by_category.get("other", 0) < 0.01 * plan.peak_allocated
