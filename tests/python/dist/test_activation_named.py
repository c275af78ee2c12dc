"""Values named in sharded blocks, on two ranks: bytes are exact, and the bits are as
without offload, with dropout and under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide import ActivationPolicy, fully_shard
from support import gpt2
from support.bits import same_bits
from support.model import Block, ModelConfig, batch, build, loss_fn
from support.systems import get_system
from support.training import Run, adamw, local_params, shard

STEPS = 3
CONFIG = ModelConfig(num_layers=4, dropout=0.1)
TOKENS = CONFIG.batch * CONFIG.seq
RESIDUAL_BYTES = 4 * TOKENS * CONFIG.dim
HIDDEN_BYTES = 4 * TOKENS * CONFIG.ffn


class NamedBlock(Block):
    """A block of a Llama whose author names two values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(lowtide.tag(x, "residual"))


def name_hidden(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return lowtide.tag(output, "hidden")


def train_llama(policy: dict[str, Any] | None) -> dict[str, Any]:
    run = Run(CONFIG, param_dtype=None)
    model = build(run.model)
    for layer in model.layers:
        layer.__class__ = NamedBlock
        layer.w1.register_forward_hook(name_hidden)
        if policy is not None:
            lowtide.checkpoint(layer, ActivationPolicy(**policy))
    shard(model, run, get_system("lowtide"))
    optimizer = adamw(model, foreach=False)
    losses = []
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        ids, targets = batch(run.model, step, 0, dist.get_rank())
        loss = loss_fn(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 0:  # the process may have trained others before
            lowtide.memory_report(model, reset_peaks=True)
    report = lowtide.memory_report(model).to_dict()["activations"]
    return {"losses": losses, "params": local_params(model), "report": report}


def assert_equal_runs(ours: list[Any], plain: list[Any]) -> None:
    for mine, other in zip(ours, plain, strict=True):
        assert mine["losses"] == other["losses"]
        assert mine["params"].keys() == other["params"].keys()
        for name, value in mine["params"].items():
            assert same_bits(value, other["params"][name]), name


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize(
    ("names", "host", "device"),
    [
        (["residual"], RESIDUAL_BYTES, RESIDUAL_BYTES),
        (["hidden"], HIDDEN_BYTES, HIDDEN_BYTES),
        (["residual", "hidden"], *2 * (RESIDUAL_BYTES + HIDDEN_BYTES,)),
    ],
    ids=str,
)
def test_offloaded_values_of_a_sharded_llama(
    names: list[str],
    host: int,
    device: int,
    prefetch: int,
    pool_of: Callable[[int], Any],
) -> None:
    pool = pool_of(2)
    plain = pool.run(train_llama, None)
    ours = pool.run(train_llama, {"offload": names, "prefetch": prefetch})
    assert_equal_runs(ours, plain)
    for each in ours:
        report = each["report"]
        assert report["host_peak"] == CONFIG.num_layers * host
        assert report["device_peak"] == (1 + prefetch) * device
        assert report["host_live"] == 0
        for name in names:
            moved = (STEPS - 1) * CONFIG.num_layers
            assert report["names"][name]["moved"] == moved


def train_gpt2(policy: dict[str, Any] | None) -> dict[str, Any]:
    model = gpt2.build()
    for block in model.transformer.h:
        if policy is not None:
            lowtide.checkpoint(block, ActivationPolicy(**policy))
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model, foreach=False)
    losses = []
    for step in range(STEPS):
        loss = gpt2.loss_of(model, step, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report = lowtide.memory_report(model).to_dict()["activations"]
    return {"losses": losses, "params": local_params(model), "report": report}


def test_offloaded_values_of_a_sharded_gpt2(pool_of: Callable[[int], Any]) -> None:
    pool = pool_of(2)
    plain = pool.run(train_gpt2, None)
    ours = pool.run(train_gpt2, {"offload": ["input", "h.*.attn"]})
    assert_equal_runs(ours, plain)
    moved = STEPS * gpt2.LAYERS * gpt2.RESIDUAL_BYTES
    for each in ours:
        assert each["report"]["names"]["input"]["moved_bytes"] == moved
