"""When a step is over in programs with several optimizers."""

from __future__ import annotations

import pytest

from support.planned import plan_text

pytestmark = pytest.mark.slow

# More than a workspace of cuBLAS, which would make the peak.
WEIGHT = 4096 * 4096 * 4
BUILD = """
import torch
from torch import nn

def step(optimizer, *models):
    x = torch.ones(4, 4096, device="cuda")
    for model in models:
        x = model(x)
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()

a, b = (nn.Linear(4096, 4096, bias=False).cuda() for _ in range(2))
of_a, of_b = (torch.optim.Adam(m.parameters()) for m in (a, b))
"""


@pytest.mark.parametrize(("steps", "repeats"), [(1, 1), (3, 5)])
def test_every_optimizer_has_its_steps(tmp_path, steps, repeats):
    text = f"""
while True:
    for _ in range({repeats}):
        step(of_a, a)
    step(of_b, a, b)
"""
    plan = plan_text(tmp_path, BUILD + text, steps=steps)
    assert plan.by_category["optimizer_state"] >= 4 * WEIGHT
    assert plan.steps == steps * repeats
    assert plan.notes == []


def test_an_optimizer_for_each_parameter(tmp_path):
    text = """
model = nn.Sequential(a, b)
optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}
del of_a, of_b

def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
while True:
    model(torch.ones(4, 4096, device="cuda")).sum().backward()
"""
    plan = plan_text(tmp_path, BUILD + text, steps=1)
    assert plan.by_category["optimizer_state"] >= 4 * WEIGHT


def test_an_optimizer_that_never_steps_is_said(tmp_path):
    plan = plan_text(tmp_path, BUILD + "while True: step(of_a, a)\n")
    assert plan.steps == 30
    assert plan.notes == [
        "Adam did not step as often: what it holds from its first steps on may not be "
        "in the figures"
    ]
