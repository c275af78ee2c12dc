"""`lowtide plan --gpu`: on torch's own CUDA, over the dry driver."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.cli import main
from lowtide.planning import Plan, PlanError, plan_request
from lowtide.planning.request import Request, Script
from support import planned
from support.finiteness import BUILD, EXPRESSIONS, STEPS

# What the simulated device has not: convolutions, top-k, sizes that depend on values.
SCRIPT = """
import json, torch
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16384, 8))
model.to("cuda")(torch.zeros(1, 3, 18, 18, device="cuda"))
optimizer = torch.optim.AdamW(model.parameters())
chosen = 0
while True:
    x = torch.randn(8, 3, 18, 18, device="cuda")
    best = model(x).topk(4).values
    kept = best[best > 0]
    chosen = len(kept)
    {decide}
    kept.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WEIGHTS = 4 * (64 * 3 * 9 + 64 + 8 * 64 * 256 + 8)


def plan_of(folder: Path, text: str, **settings) -> Plan:
    script = folder / "train.py"
    script.write_text(text)
    return plan_request(Request(Script(str(script)), gpu="a100-40", **settings))


def test_a_program_that_only_cuda_runs(tmp_path):
    plan = plan_of(tmp_path, SCRIPT.format(decide="pass"), nonzero=0.5)
    for category, times in (("parameters", 1), ("optimizer_state", 2)):
        assert 1 <= plan.by_category[category] / (times * WEIGHTS) < 1.01
    assert plan.peak_reserved >= plan.peak_allocated
    (sizes,) = plan.notes
    assert sizes == (
        "a size that depends on data is 50% of all elements "
        f"({tmp_path / 'train.py'}:11, IndexBackward0)"
    )


@pytest.mark.parametrize(
    ("decide", "decides"),
    [
        ("if (x > 0).any(): pass", True),
        ("for i in range((x > 0).sum()): pass", True),
        ("print(kept.sum().item())", False),
        ("if (torch.tensor([1, 2], device='cuda') > 1).any(): pass", False),
        ("for i in range(torch.arange(3).cuda().sum()): pass", False),
        ("if torch.isfinite(x).all(): pass", False),
    ],
)
def test_lines_that_decide_by_values_nobody_computed(tmp_path, decide, decides):
    notes = plan_of(tmp_path, SCRIPT.format(decide=decide)).notes
    said = [note for note in notes if "decide at" in note]
    assert said == [
        f"values that nobody computed decide at {tmp_path / 'train.py'}:13: they read "
        "as False, numbers as 1, and the figures are those of that way"
    ] * int(decides)


def test_what_is_derived_from_finiteness(tmp_path):
    decide = "lowtide.clip_grad_norm_(parameters, 1.0, skip_nonfinite=True)"
    text = f"""{BUILD}
x = torch.randn(4, device="cuda")

def overwritten(flags):
    flags[0] = False
    return flags.all()

found = {{e: bool(eval(e)) for e in {list(EXPRESSIONS)!r}}}
with open({str(tmp_path / "found.json")!r}, "w") as file:
    json.dump(found, file)
{STEPS.format(decide=decide)}"""
    plan = plan_of(tmp_path, text)
    assert json.loads((tmp_path / "found.json").read_text()) == EXPRESSIONS
    assert plan.by_category["optimizer_state"] >= 2 * 4 * 512 * 512


@pytest.mark.parametrize("rank", [0, 3])
def test_a_sharded_llama_takes_what_the_simulated_device_says(rank):
    request = planned.llama_request(world=4, rank=rank, system="fsdp2")
    simulated = plan_request(replace(request, allocator={}))
    plan = plan_request(replace(request, allocator={}, gpu="h100"))
    assert plan.peak_allocated == simulated.peak_allocated
    assert plan.by_category == simulated.by_category
    assert plan.peak_reserved == pytest.approx(simulated.peak_reserved, abs=2 << 20)
    assert plan.pinned is not None


def test_no_clock_there(capsys):
    assert main(["plan", "--gpu", "h100", "--time", "h100", planned.LLAMA]) == 1
    assert capsys.readouterr().err.strip() == (
        "lowtide: plan --time: expected no --gpu, where no time is kept and every "
        "operator is torch's own, got h100. Leave one of the two out."
    )


# A stream of its own reads what the default one allocates; the sizes leave gaps that
# only segments which grow can use.
STREAMS = """
import torch
from torch import nn
model = nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
side = torch.cuda.Stream()
for step in range(3):
    for mib in (30, 50, 70, 90):
        x = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.record_stream(side)
            x.sum(dtype=torch.uint8)
        del x
    model(torch.ones(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
"""


def test_other_settings_are_asked_of_torchs_allocator(tmp_path):
    """What a replay says is what a run with those settings reserves."""
    plan = plan_of(tmp_path, STREAMS)
    late = plan_of(tmp_path, STREAMS, allocator={"events": "at_sync"})
    assert plan.peak_reserved < plan.peak_reserved_bound == late.peak_reserved
    assert late.peak_reserved_bound == late.peak_reserved

    (saving,) = [s for s in plan.savings if s.what == "expandable_segments"]
    grown = plan_of(tmp_path, STREAMS, allocator={"expandable": True})
    assert grown.peak_reserved == plan.peak_reserved - saving.reserved

    enough = plan_of(tmp_path, STREAMS, device_memory=plan.peak_reserved)
    assert (enough.fits, enough.retries) == (True, 0)
    tight = plan_of(tmp_path, STREAMS, device_memory=plan.peak_reserved - 1)
    assert tight.fits and tight.retries > 0
    # One tensor alone is larger: segments that grow would be no help.
    little = plan_of(tmp_path, STREAMS, device_memory=64 << 20)
    assert not little.fits and not little.savings
    grows = {"device_memory": 64 << 20, "allocator": {"expandable": True}}
    with pytest.raises(PlanError, match="status -11.* larger than the GPU"):
        plan_of(tmp_path, STREAMS, **grows)
