"""``grads="fused"``: gradients that come in blocks of rows, an embedding's and a
vocabulary loss's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import lowtide
from lowtide._sharding import embedding
from support.fused import DIM


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, DIM, padding_idx=8)
        self.head = nn.Linear(DIM, 301, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # Twice, in two shapes: the calls are summed.
        x = self.embed(ids) * self.embed(ids.flip(0) // 2)
        return lowtide.losses.linear_cross_entropy(
            x, self.head, ids, chunking="vocabulary"
        )


def looked_up(grads: str, dtype: torch.dtype | None) -> tuple[Any, dict[str, str]]:
    large = mock.patch.object(embedding, "LARGE_TABLE", 0)
    with large, mock.patch.object(embedding, "LOOKUP_BYTES", 20 * 4 * DIM):
        torch.manual_seed(0)
        model: Any = Lookup()
        policy = MixedPrecisionPolicy(dtype, torch.float32)
        for unit in (model.embed, model.head, model):
            lowtide.fully_shard(unit, mp_policy=policy, grads=grads)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        # Some rows many times.
        ids = torch.randint(30, (4, 50), generator=generator) * 4
        model(ids).backward()
        report = lowtide.memory_report(model).fused
        gradient = model.embed.weight.grad.full_tensor()
        return gradient, report.exact if report else {}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_of_a_large_embedding_are_summed_in_fp32(pool_of, ranks):
    (exact, _), *_ = pool_of(ranks).run(looked_up, "exact", None)
    (fused, why), *_ = pool_of(ranks).run(looked_up, "fused", None)
    # Call after call in the same rows, instead of sums of both.
    torch.testing.assert_close(fused, exact)
    assert why == {"head.weight": "its gradient comes in blocks of rows"}
    # bf16: each row's sum is rounded in the exact mode, not here.
    (rounded, _), *_ = pool_of(ranks).run(looked_up, "exact", torch.bfloat16)
    (summed, _), *_ = pool_of(ranks).run(looked_up, "fused", torch.bfloat16)
    assert (summed - exact).norm() < (rounded - exact).norm()
    assert torch.equal(summed[8], torch.zeros(DIM))
