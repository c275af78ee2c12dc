"""Would it fit, would segments that grow help, how late may the host be: torch's
allocator is asked the recorded requests again, and a run with those settings agrees."""

from __future__ import annotations

import pytest

from lowtide._torch_version import VERSION
from lowtide.planning import PlanError
from lowtide.planning.run import allocator_conf
from support.planned import plan_text

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
GROWING = "import os; os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("streams")


@pytest.fixture(scope="module")
def plan(folder):
    return plan_text(folder, STREAMS)


@pytest.mark.slow
def test_a_host_that_runs_ahead(folder, plan):
    late = plan_text(folder, STREAMS, events="at_sync")
    assert plan.peak_reserved < plan.peak_reserved_bound == late.peak_reserved
    assert late.peak_reserved_bound == late.peak_reserved


def test_segments_that_grow(folder, plan):
    """Set by the program itself, as by PYTORCH_ALLOC_CONF."""
    (saving,) = [s for s in plan.savings if s.what == "expandable_segments"]
    grown = plan_text(folder, GROWING + STREAMS)
    assert not plan.allocator["expandable"] and grown.allocator["expandable"]
    assert grown.peak_reserved == plan.peak_reserved - saving.reserved
    assert saving.basis == "replayed"
    assert not [s for s in grown.savings if s.what == "expandable_segments"]


def test_a_gpu_with_just_enough_memory(folder, plan):
    enough = plan_text(folder, STREAMS, device_memory=plan.peak_reserved)
    assert (enough.fits, enough.retries) == (True, 0)
    tight = plan_text(folder, STREAMS, device_memory=plan.peak_reserved - 1)
    assert tight.fits and tight.retries > 0
    assert tight.peak_reserved == plan.peak_reserved  # as where there is enough


def test_a_gpu_with_too_little(folder):
    """One tensor alone is larger: segments that grow would be no help."""
    little = plan_text(folder, STREAMS, device_memory=64 << 20)
    assert not little.fits and not little.savings


def test_a_tensor_larger_than_the_gpu_where_segments_grow(folder):
    """torch crashes there before 2.15."""
    settings = {"device_memory": 64 << 20, "allocator": allocator_conf("expandable")}
    with pytest.raises(PlanError) as raised:
        plan_text(folder, STREAMS, **settings)
    line = folder / "train.py"
    if VERSION >= (2, 15):
        assert f"got OutOfMemoryError at {line}:9" in str(raised.value)
        return
    assert str(raised.value) == (
        "lowtide: plan: expected the process that runs the program to answer, got its "
        f"end with status -11 at {line}:9 in <module>. A negative "
        "status is a signal: -9 is often the host's memory running out, -11 with "
        "expandable segments one tensor that is larger than the GPU."
    )


SPLIT = "max_split_size_mb:64"


@pytest.mark.parametrize(
    ("environment", "asked", "conf"),
    [
        ({}, None, ""),
        ({"PYTORCH_ALLOC_CONF": SPLIT}, None, SPLIT),
        ({"PYTORCH_CUDA_ALLOC_CONF": SPLIT}, None, SPLIT),
        ({"PYTORCH_ALLOC_CONF": SPLIT}, "expandable", "expandable_segments:True"),
        ({}, "roundup_power2_divisions:4", "roundup_power2_divisions:4"),
    ],
)
def test_settings_are_those_of_the_environment(monkeypatch, environment, asked, conf):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert allocator_conf(asked) == conf


# Small blocks that stay are made while larger ones wait, apart from them; on the next
# step blocks of another size come to where the larger ones were.
APART = """
import torch
from torch import nn
model = nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(3):
    sizes = (30 << 20,) * 6
    waiting = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in sizes]
    if not kept:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            for place in range(0, 6, 2):
                waiting[place] = None
                kept.append(torch.empty(15 << 20, dtype=torch.uint8, device="cuda"))
        del pool
    waiting.clear()
    large = torch.empty(150 << 20, dtype=torch.uint8, device="cuda")
    del large
    model(torch.ones(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_pool_that_a_program_has_made(folder):
    plan = plan_text(folder, APART)
    (saving,) = [s for s in plan.savings if s.what == "expandable_segments"]
    grown = plan_text(folder, GROWING + APART)
    assert grown.peak_reserved == plan.peak_reserved - saving.reserved
    assert grown.peak_reserved < plan.peak_reserved
    assert plan.peak_reserved_bound == plan.peak_reserved
