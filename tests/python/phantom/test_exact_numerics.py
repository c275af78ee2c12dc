"""In exact mode every result has the CPU's bits, forward and backward, although the
device keeps and frees what CUDA's fused kernels would."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llama import CONFIGS, Llama, init_weights
from support.phantom import PhantomOf

BF16 = torch.bfloat16
SEED = 11


def values(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def tokens(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(SEED))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kw: Any) -> Any:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **kw)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def on_device_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.to(x.device)


def embed(weight: torch.Tensor, count: int) -> torch.Tensor:
    return F.embedding(on_device_of(weight, tokens(len(weight), count)), weight)


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    targets = on_device_of(logits, tokens(logits.shape[1], len(logits)))
    return F.cross_entropy(logits.float(), targets, ignore_index=3, label_smoothing=0.1)


def accumulate(x: torch.Tensor) -> torch.Tensor:
    rows = on_device_of(x, tokens(len(x), 40))
    return torch.zeros_like(x).index_put((rows,), x[rows], accumulate=True)


QKV = (values(2, 4, 24, 16), values(2, 4, 24, 16, seed=1), values(2, 4, 24, 16, seed=2))
GROUPED = (QKV[0], QKV[1][:, :2], QKV[2][:, :2])
X = values(3, 20, 64)
WEIGHT = values(64, seed=3)

Case = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]
CASES: dict[str, Case] = {
    "linear": (F.linear, (X, values(48, 64, seed=4), values(48, seed=5))),
    "expanded gradient": (lambda a, b: (a @ b).sum(), (X[0], values(64, 8))),
    "bmm": (torch.bmm, (X, values(3, 64, 20, seed=6))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (64,), w, 1e-5), (X, WEIGHT)),
    "rms_norm fp32": (
        lambda x, w: F.rms_norm(x, (64,), w),
        (X.float(), WEIGHT.float()),
    ),
    "rms_norm of 43 columns": (
        lambda x, w: F.rms_norm(x, (43,), w),
        (X.float()[..., :43].contiguous(), WEIGHT.float()[:43].clone()),
    ),
    "rms_norm mixed": (lambda x, w: F.rms_norm(x, (64,), w), (X, WEIGHT.float())),
    "rms_norm of two dims": (
        lambda x, w: F.rms_norm(x, (20, 64), w),
        (X, values(20, 64, seed=3)),
    ),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (64,), w, b),
        (X, WEIGHT, values(64, seed=5)),
    ),
    "layer_norm fp32": (lambda x: F.layer_norm(x, (64,)), (X.float(),)),
    "attention": (attention, QKV),
    "causal attention": (partial(attention, is_causal=True), QKV),
    "fp32 attention": (
        partial(attention, is_causal=True),
        tuple(t.float() for t in QKV),
    ),
    "grouped attention": (partial(attention, is_causal=True, scale=0.3), GROUPED),
    "fp32 grouped attention": (
        partial(attention, is_causal=True),
        tuple(t.float() for t in GROUPED),
    ),
    "attention of three dims": (attention, tuple(t[0] for t in QKV)),
    "masked attention": (masked_attention, (*QKV, values(2, 1, 24, 24, seed=7))),
    "dropped attention": (partial(attention, dropout_p=0.3), QKV),
    "silu": (F.silu, (X,)),
    "gelu": (partial(F.gelu, approximate="tanh"), (X,)),
    "mish": (F.mish, (X,)),
    "softmax": (lambda x: torch.softmax(x, -1, dtype=torch.float32), (X,)),
    "dropout": (partial(F.dropout, p=0.25), (X,)),
    "few rows embedded": (partial(embed, count=50), (values(30, 16),)),
    "many rows embedded": (partial(embed, count=4000), (values(30, 16),)),
    "cross entropy": (cross_entropy, (values(60, 37),)),
    "index_put": (accumulate, (values(10, 4, dtype=torch.float32),)),
    "group_norm": (lambda x: F.group_norm(x, 4), (values(3, 20, 64),)),
    "convolution": (
        lambda x, w: F.conv2d(x, w, padding=1),
        (values(2, 3, 8, 8, dtype=torch.float32), values(4, 3, 3, 3).float()),
    ),
    "complex rotation": (
        lambda x: torch.view_as_real(
            torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
            * on_device_of(x, torch.polar(torch.ones(32), torch.arange(32.0)))
        ),
        (X,),
    ),
}


def results(name: str, device: str) -> list[torch.Tensor]:
    """Output and gradients."""
    function, inputs = CASES[name]
    torch.manual_seed(SEED)
    leaves = [t.detach().clone().to(device).requires_grad_() for t in inputs]
    output = function(*leaves)
    torch.manual_seed(SEED + 1)
    if output.dim():
        output.backward(values(*output.shape, dtype=output.dtype, seed=9).to(device))
    else:
        output.backward()
    return [output.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]


def different(name: str) -> list[int]:
    """Which of output and gradients differ between phantom and CPU."""
    pairs = zip(results(name, "phantom"), results(name, "cpu"), strict=True)
    return [i for i, (mine, theirs) in enumerate(pairs) if not same(mine, theirs)]


def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return (
        mine.dtype == theirs.dtype
        and mine.shape == theirs.shape
        and torch.equal(mine.contiguous().view(-1), theirs.contiguous().view(-1))
        and bool(mine.isfinite().all())
    )


@pytest.mark.parametrize("name", CASES)
def test_operators(phantom: PhantomOf, name: str):
    assert phantom("exact").run(different, name) == []


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "foreach AdamW": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "fused AdamW": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


def train(device: str, optimizer: str, clip: bool) -> list[torch.Tensor]:
    model = Llama(CONFIGS["tiny"])
    init_weights(model, seed=3)
    model.to(device)
    steps = OPTIMIZERS[optimizer](model.parameters())
    out = []
    for step in range(3):
        batch = tokens(256, 2, 33) + step
        batch = (batch % 256).to(device)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(
                model.parameters(), 1.0, foreach="foreach" in optimizer
            )
            out.append(norm.cpu())
        out += [p.grad.cpu() for p in model.parameters()]
        steps.step()
        steps.zero_grad()
        out.append(loss.detach().cpu())
    return out + [p.detach().cpu() for p in model.parameters()]


def differing_tensors(optimizer: str, clip: bool) -> tuple[int, int]:
    mine = train("phantom", optimizer, clip)
    theirs = train("cpu", optimizer, clip)
    return len(mine), sum(not same(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training(phantom: PhantomOf, optimizer: str, clip: bool):
    compared, different = phantom("exact").run(differing_tensors, optimizer, clip)
    assert compared > 80
    assert different == 0
