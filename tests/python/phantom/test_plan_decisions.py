"""A plan says where the program decided by values that nobody computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.planning import plan_request
from lowtide.planning.request import Request, Script

SCRIPT = """import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.ones(4, 64, device="cuda")
while True:
    {decide}
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def notes(folder: Path, decide: str) -> list[str]:
    (folder / "train.py").write_text(SCRIPT.format(decide=decide))
    return plan_request(Request(Script(str(folder / "train.py")))).notes


@pytest.mark.parametrize(
    "decide",
    [
        "if (x > 0).any(): model(x)",
        "if not x.sum() > 5: model(x)",
        "mixed = (x > 0).all().item()",
        "if torch.allclose(x, x): model(x)",
        "for i in range(x.sum().long()): model(x)",
        "if 1.0 in x: model(x)",
    ],
)
def test_lines_that_decide_are_named(tmp_path, decide):
    assert notes(tmp_path, decide) == [
        f"values that nobody computed decide at {tmp_path / 'train.py'}:6: they read "
        "as False, numbers as 1, and the figures are those of that way"
    ]


@pytest.mark.parametrize(
    "decide",
    [
        "print(x.sum().item(), x.tolist(), float(x[0, 0]))",
        "if torch.isfinite(x).all(): pass",
        "if (torch.ones(3) > 0).all(): pass",
        "torch.nn.utils.clip_grad_norm_([x], 1, error_if_nonfinite=True)",
        "if x.is_cuda and x.requires_grad: pass",
    ],
)
def test_other_values_are_not(tmp_path, decide):
    assert notes(tmp_path, decide) == []


def test_many_lines(tmp_path):
    decide = "\n    ".join(["if (x > 0).any(): pass"] * 7)
    (note,) = notes(tmp_path, decide)
    assert note.count("train.py:") == 5
    assert "train.py:10 and 2 more lines: they read" in note
