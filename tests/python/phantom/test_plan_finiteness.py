"""Scripts that skip a step whose numbers are not finite are planned with the step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.planning import Plan, plan_request
from lowtide.planning.request import Request, Script
from support.finiteness import BUILD, EXPRESSIONS, STEPS


def planned(tmp_path: Path, text: str) -> Plan:
    script = tmp_path / "train.py"
    script.write_text(text)
    return plan_request(Request(Script(str(script))))


@pytest.mark.parametrize(
    "decide",
    [
        "lowtide.clip_grad_norm_(parameters, 1.0, skip_nonfinite=True)",
        "torch.isfinite(clip(parameters, 1.0)) or optimizer.zero_grad()",
        "if not all(torch.isfinite(p.grad).all() for p in parameters): continue",
    ],
)
def test_a_step_is_kept(tmp_path, decide):
    plan = planned(tmp_path, BUILD + STEPS.format(decide=decide))
    weight = (512 * 512 + 512) * 4
    assert plan.by_category["gradients"] >= weight
    assert plan.by_category["optimizer_state"] >= 2 * weight
    assert plan.notes == []


def test_steps_without_gradients_are_said(tmp_path):
    decide = "if not clip(parameters, 1.0) < 5: optimizer.zero_grad()"
    without, decided = planned(tmp_path, BUILD + STEPS.format(decide=decide)).notes
    assert without == (
        "AdamW stepped without gradients, 3 times in 3 steps: what the program decides "
        "by values read back, 1 or False, may have dropped them"
    )
    assert "train.py:10: they read as False" in decided


def test_what_is_derived_from_finiteness(tmp_path):
    text = f"""{BUILD}
x = torch.randn(4, device="cuda")

def overwritten(flags):
    flags[0] = False
    return flags.all()

found = {{e: bool(eval(e)) for e in {list(EXPRESSIONS)!r}}}
with open({str(tmp_path / "found.json")!r}, "w") as file:
    json.dump(found, file)
{STEPS.format(decide="pass")}"""
    planned(tmp_path, text)
    assert json.loads((tmp_path / "found.json").read_text()) == EXPRESSIONS
