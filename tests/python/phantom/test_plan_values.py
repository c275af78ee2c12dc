"""What programs decide by values that nobody computed, and what a plan says of it."""

from __future__ import annotations

import json

import pytest

from support.planned import plan_text

BUILD = """
import json, math, torch, lowtide
model = torch.nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
parameters = list(model.parameters())
clip = torch.nn.utils.clip_grad_norm_
batch = x = torch.randn(8, 512, device="cuda")
"""
STEPS = """
while True:
    model(batch).sum().backward()
    {decide}
    optimizer.step()
    optimizer.zero_grad()
"""
WIDE = BUILD.replace("512", "4096")
# More than a workspace of cuBLAS, which would make the peak.
WEIGHT = (4096 * 4096 + 4096) * 4

# (statement, whether it decides by what nobody computed)
STATEMENTS = [
    ("if (x > 0).any(): pass", True),
    ("if not x.sum() > 5: pass", True),
    ("print(x.sum().item(), x[0].tolist(), float(x[0, 0]))", False),
    ("mixed = (x > 0).all().item()", True),
    ("if torch.isfinite(x).all(): pass", False),
    ("if torch.allclose(x, x + 1): pass", True),
    ("if (torch.tensor([1, 2], device='cuda') > 1).any(): pass", False),
    ("for i in range(torch.arange(3).cuda().sum()): pass", False),
    ("for i in range((x > 0).sum()): pass", True),
    ("if x.is_cuda and not x.requires_grad: pass", False),
    ("clip([x], 1, error_if_nonfinite=True)", False),
    ("if 1.5 in x: pass", True),
    ("if bool(x[0, 0] > 0): pass", True),
    ("if x.mean().item() > 5: pass", True),
    ("loss = x.mean().item()", False),
    ("if loss > 5: pass", True),
]


def test_lines_that_decide_are_named(tmp_path):
    """Five of them, and how many more there are."""
    first_line = STEPS.replace("{decide}", "|")[: STEPS.index("{")].count("\n")
    first_line += BUILD.count("\n") + 1
    text = BUILD + STEPS.format(decide="\n    ".join(text for text, _ in STATEMENTS))
    lines = [n for n, (_, decides) in enumerate(STATEMENTS, first_line) if decides]
    plan = plan_text(tmp_path, text)
    shown = ", ".join(f"{tmp_path / 'train.py'}:{line}" for line in lines[:5])
    assert plan.notes == [
        f"values that nobody computed decide at {shown} and {len(lines) - 5} more "
        "lines: they read as False, numbers as 1, and the figures are those of that way"
    ]


# Of x, whose numbers nobody computed: all of them are finite.
EXPRESSIONS = {
    "torch.isfinite(x).all()": True,
    "x.isfinite().all().item()": True,
    "torch.isfinite(input=x[0])": True,
    "torch.isnan(x).any()": False,
    "x.isinf().any().item()": False,
    "(~torch.isnan(x)).all()": True,
    "torch.isnan(x).logical_not().all()": True,
    "(x.isnan() | x.isinf()).any()": False,
    "(x.isfinite() & ~x.isnan()).all()": True,
    "torch.stack([v.isfinite() for v in x]).all()": True,
    "torch.isnan(x).sum() == 0": True,
    "torch.isnan(x).any().float().item() > 0": False,
    "torch.isfinite(x).cpu()[3]": True,
    "x.isfinite().to('cpu', non_blocking=True).all()": True,
    "x.isfinite().tolist()[1]": True,
    "torch.zeros(4, dtype=torch.bool).copy_(x.isfinite()).all()": True,
    "torch.zeros(4, dtype=torch.bool, device='cuda').copy_(x.isfinite()).all()": True,
    "math.isfinite(x[0].item())": True,
    "overwritten(x.isfinite())": False,
    "x.isfinite().logical_not_().any()": False,
    "(x.isfinite() & (x > 0)).any()": False,
    "x.isfinite().sum() == 3": False,
    "(x > 0).any()": False,
    "torch.isfinite(torch.tensor(math.nan))": False,
    "torch.isnan(torch.tensor(math.nan))": True,
    "(torch.tensor(5) | 1) == 5": True,
    "torch.isnan(torch.tensor(math.nan) * 0)": True,
}
GUARDS = """lowtide.clip_grad_norm_(parameters, 1.0, skip_nonfinite=True)
    torch.isfinite(clip(parameters, 1.0)) or optimizer.zero_grad()
    if not all(torch.isfinite(p.grad).all() for p in parameters): continue"""


def test_steps_that_guard_against_overflow_are_made(tmp_path):
    ask = f"""
def overwritten(flags):
    flags[0] = False
    return flags.all()

x = torch.randn(4, device="cuda")
found = {{e: bool(eval(e)) for e in {list(EXPRESSIONS)!r}}}
with open({str(tmp_path / "found.json")!r}, "w") as file:
    json.dump(found, file)
"""
    plan = plan_text(tmp_path, WIDE + ask + STEPS.format(decide=GUARDS))
    assert json.loads((tmp_path / "found.json").read_text()) == EXPRESSIONS
    assert plan.by_category["gradients"] >= WEIGHT
    assert plan.by_category["optimizer_state"] >= 2 * WEIGHT
    assert not [note for note in plan.notes if "stepped without gradients" in note]


def test_steps_without_gradients_are_said(tmp_path):
    decide = "if not clip(parameters, 1.0) < 5: optimizer.zero_grad()"
    without, decided = plan_text(tmp_path, BUILD + STEPS.format(decide=decide)).notes
    assert without == (
        "AdamW stepped without gradients, 3 times in 3 steps: what the program decides "
        "by values read back, 1 or False, may have dropped them"
    )
    assert "train.py:11: they read as False" in decided


@pytest.mark.slow
def test_sizes_that_depend_on_data_are_a_share(tmp_path):
    decide = """best = model(batch).topk(256).values
    kept = best[best > 0]
    (kept.exp() * kept).sum().backward()"""
    text = BUILD + STEPS.format(decide=decide)
    # Of 8 x 256, two numbers each.
    for share, indices in ((1.0, 2048 * 16), (0.5, 1024 * 16)):
        plan = plan_text(tmp_path, text, nonzero=share)
        assert plan.notes == [
            f"a size that depends on data is {share:.0%} of all elements "
            f"({tmp_path / 'train.py'}:12, IndexBackward0)"
        ]
        assert plan.moments["loss"].by_category["temporaries"] == indices
