"""Ring attention of torch's `context_parallel` for CPUs, whose own kernel of attention
it has no handler for: the same ring, around that kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import (
    _attention as attention,
)

ATEN = torch.ops.aten
FORWARD = ATEN._scaled_dot_product_flash_attention_for_cpu
BACKWARD = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
SEQUENCE = 2  # the dimension of [batch, heads, tokens, features]


def _wrapped(locals_: tuple[torch.Tensor, ...], mesh: Any) -> tuple[DTensor, ...]:
    return tuple(
        DTensor.from_local(one, mesh, [Shard(SEQUENCE)], run_check=False)
        for one in locals_
    )


def _forward(op: Any, args: Any, kwargs: Any) -> tuple[DTensor, ...]:
    mesh = args[0].device_mesh
    defaults = {"dropout_p": 0.0, "is_causal": False}
    settings = defaults | kwargs | dict(zip(defaults, args[3:], strict=False))
    out = attention._templated_ring_attention(
        mesh.get_group(),
        SEQUENCE,
        FORWARD,
        *(one.to_local() for one in args[:3]),
        **settings,
    )
    return _wrapped(out, mesh)


def _backward(op: Any, args: Any, kwargs: Any) -> tuple[DTensor, ...]:
    *tensors, dropout_p, is_causal = args
    mesh = tensors[0].device_mesh
    grad_out, q, k, v, out, logsumexp = (one.to_local() for one in tensors)
    gradients = attention._templated_ring_attention_backward(
        mesh.get_group(),
        SEQUENCE,
        BACKWARD.default,
        grad_out=grad_out,
        grad_out_name="grad_out",
        query=q,
        key=k,
        value=v,
        out=out,
        logsumexp=logsumexp,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )
    return _wrapped(gradients, mesh)


def prepare() -> None:
    """Before the context is entered."""
    attention.custom_ops[FORWARD.default] = _forward
    attention.custom_ops[BACKWARD.default] = _backward
