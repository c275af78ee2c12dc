"""GPT-2 from transformers, with dropout and under autocast: the same bits whatever is
offloaded, saved or computed again, over three steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtide
from lowtide import ActivationPolicy
from support.blocks import assert_same_bits
from support.gpt2 import LAYERS, RESIDUAL_BYTES, build, loss_of

STEPS = 3


def train(policy: dict[str, Any] | None) -> tuple[list[torch.Tensor], Any]:
    """Losses, gradients and parameters of every step, and the report."""
    model = build()
    if policy is not None:
        for block in model.transformer.h:
            lowtide.checkpoint(block, ActivationPolicy(**policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        seen += [p.detach().clone() for p in model.parameters()]
    return seen, lowtide.memory_report(model).activations if policy else None


@pytest.mark.parametrize(
    "policy",
    [
        {"offload": ["input"]},
        {"offload": ["input"], "save": ["h.*.mlp.c_fc"]},
        {"offload": ["input", "h.*.attn"], "prefetch": 2},
        {"offload": ["input", "h.*.attn.c_attn"], "keep_last": 1},
    ],
    ids=str,
)
def test_same_bits_with_dropout_under_autocast(policy: dict[str, Any]) -> None:
    plain, _ = train(None)
    ours, report = train(policy)
    assert_same_bits(ours, plain)
    name = report.names["input"]
    sent = LAYERS - policy.get("keep_last", 0)
    assert name.moved == STEPS * sent
    assert name.moved_bytes == STEPS * sent * RESIDUAL_BYTES
    assert report.host_live == 0
    assert report.problems == []
