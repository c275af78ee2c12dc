"""``grads="fused"``: forwards and the gradients of inputs and biases have the bits of
``F.linear``'s for every layout of the input; torch adds the bias in the product of some
and after it in others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import lowtide
from support.bits import difference, same_bits

IN, OUT = 64, 32
Layout = Callable[[torch.Tensor], torch.Tensor]

# Of 40 tokens.
LAYOUTS: dict[str, Layout] = {
    "2-D": lambda x: x.view(40, IN),
    "2-D transposed": lambda x: x.view(IN, 40).t(),
    "2-D expanded": lambda x: x[:IN].expand(40, IN),
    "3-D": lambda x: x.view(4, 10, IN),
    "3-D of other tokens": lambda x: x.view(10, 4, IN).transpose(0, 1),
    "3-D transposed": lambda x: x.view(4, IN, 10).transpose(1, 2),
    "3-D of every other token": lambda x: x.view(4, 10, IN)[:, ::2],
    "3-D expanded": lambda x: x.view(4, 10, IN)[:1].expand(4, 10, IN),
    "3-D of one token": lambda x: x[:IN].expand(4, 10, IN),
    "3-D without tokens": lambda x: x.view(4, 10, IN)[:, :0],
    "4-D": lambda x: x.view(2, 2, 10, IN),
    "4-D transposed": lambda x: x.view(2, 10, 2, IN).transpose(1, 2),
    "4-D expanded": lambda x: x.view(1, 4, 10, IN)[..., :2, :, :].expand(2, 2, 10, IN),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def trained(grads: str, bias: bool, dtype: torch.dtype) -> list[dict[str, Any]]:
    """By layout."""
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(IN, OUT, bias=bias))
    lowtide.fully_shard(model, mp_policy=policy, grads=grads)
    found = []
    for layout in LAYOUTS.values():
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(40 * IN, generator=generator).to(dtype).requires_grad_()
        y = model(layout(x))
        y.mul(torch.linspace(-1, 1, y.numel()).view_as(y)).square().sum().backward()
        values = {"output": y, "input": x.grad}
        for name, parameter in model.named_parameters():
            # In half types a fused product is not rounded.
            if dtype == torch.float32 or name == "0.bias":
                values[name] = parameter.grad.full_tensor()
        values["strides"] = y.stride()
        found.append(values)
        model.zero_grad()
    report = lowtide.memory_report(model).fused
    assert report is None or report.exact == {}
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_has_the_bits_of_torchs_linear(pool_of, bias, dtype):
    (exact,) = pool_of(1).run(trained, "exact", bias, dtype)
    (fused,) = pool_of(1).run(trained, "fused", bias, dtype)
    for layout, mine, other in zip(LAYOUTS, fused, exact, strict=True):
        assert mine.pop("strides") == other.pop("strides"), layout
        for name, value in other.items():
            got = mine[name]
            assert same_bits(got, value), (layout, name, difference(got, value))
