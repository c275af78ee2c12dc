"""``grads="fused"``: tangents of forward-mode differentiation pass through layers, as
they do through ``F.linear``."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.func import functional_call, jvp

import lowtide
from support.bits import same_bits
from support.fused import data, model_of
from support.recorder import Record, Recorder, assert_same_records


def tangents_of(grads: str) -> tuple[list[torch.Tensor | None], Record, dict[str, str]]:
    """Of outputs, by what has a tangent; then of a step without one."""
    model, record = model_of(grads), Recorder()
    found: list[torch.Tensor | None] = []

    def in_block(block: Any, x: torch.Tensor) -> torch.Tensor:
        """Other calls of a layer than the block's own."""
        block.unshard()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
            outputs = [block.up(dual)]
            for name in ("bias", "weight"):
                full = getattr(block.up, name)
                dual = forward_ad.make_dual(full, torch.ones_like(full))
                outputs.append(functional_call(block.up, {name: dual}, (x,)))
            found.extend(forward_ad.unpack_dual(each).tangent for each in outputs)
            found.append(forward_ad.unpack_dual(block.up(x)).tangent)
        found.append(jvp(block.up, (x.detach(),), (torch.ones_like(x),))[1])
        return block(x)

    with forward_ad.dual_level():
        x = data(0)
        y = model(forward_ad.make_dual(x, torch.ones_like(x)))
        found.append(forward_ad.unpack_dual(y).tangent)
        y.pow(2).sum().backward()
    record.add_model(model)
    model.zero_grad()
    model.run_block = in_block
    model(data(0)).pow(2).sum().backward()
    record.add_model(model)
    report = lowtide.memory_report(model).fused
    return found, record.values, report.exact if report else {}


def test_tangents_pass_through(pool_of):
    ((exact, expected, _),) = pool_of(1).run(tangents_of, "exact")
    ((fused, actual, why),) = pool_of(1).run(tangents_of, "fused")
    tangents = [tangent is not None for tangent in exact]
    assert tangents == [True, *[True, True, True, False, True] * 2]
    for mine, other in zip(fused, exact, strict=True):
        assert same_bits(mine, other)
    assert_same_records(actual, expected)
    assert why["head.weight"] == "forward-mode derivatives (1 use)"
    for i in range(2):
        # The whole block's, then by its input and by its bias; another weight is no
        # use of this one.
        assert why[f"blocks.{i}.up.weight"] == (
            "forward-mode derivatives (3 uses), torch.func (1 use)"
        )
