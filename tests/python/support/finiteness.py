"""What programs ask of numbers that nobody computed, all of which are finite."""

from __future__ import annotations

BUILD = """
import json, math, torch, lowtide
model = torch.nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
parameters = list(model.parameters())
clip = torch.nn.utils.clip_grad_norm_
"""
STEPS = """
for _ in range(3):
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    {decide}
    optimizer.step()
    optimizer.zero_grad()
"""

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
