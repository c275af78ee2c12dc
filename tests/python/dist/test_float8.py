"""torchao's float8 recipes with what recipes have beside them: the bits of FSDP2.

gloo gathers no float8, but bytes: what FSDP2 sends of a unit of several dtypes, a block
with its norm among them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

import lowtide
from support.recorder import (
    Record,
    Recorder,
    assert_same_records,
    assert_trains_as_fsdp2,
)
from support.systems import get_system

DIM, HIDDEN, WORDS = 32, 64, 64
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.output = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def config(recipe: str) -> Float8LinearConfig:
    if recipe == "tensorwise":
        # The product itself is float8's on a CPU, too.
        return Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    return dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),  # type: ignore[arg-type]
        emulate=True,
    )


def make(system_name: str, recipe: str, how: tuple[str, ...]) -> Any:
    system = get_system(system_name)
    torch.manual_seed(0)
    model: Any = Model()
    convert_to_float8_training(
        model, config=config(recipe), module_filter_fn=lambda _, name: name != "output"
    )
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for i, layer in enumerate(model.layers):
        if "checkpointed" in how and system_name == "lowtide":
            lowtide.checkpoint(layer)
        elif "checkpointed" in how:
            model.layers[i] = layer = checkpoint_wrapper(layer)
        if "compiled" in how:
            layer.compile(backend="aot_eager")
        system.fully_shard(layer, mp_policy=policy)
    system.fully_shard(model.output, mp_policy=policy)
    system.fully_shard(model, mp_policy=policy)
    return model


def train(system_name: str, recipe: str, how: tuple[str, ...]) -> Record:
    model = make(system_name, recipe, how)
    if "in backward" in how and system_name == "lowtide":
        optimizer: Any = lowtide.optimize_in_backward(
            model, torch.optim.AdamW, lr=0.01, foreach=False
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if "without logits" in how:
        lowtide.defer_logits(model.output)
    record = Recorder()
    for step in range(STEPS):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            seed = 100 * step + 10 * microbatch + dist.get_rank()
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, WORDS, (2, 17), generator=generator)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()
            record.add("loss", loss)
        if "clipped" in how:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            record.add("norm", norm.full_tensor())
        optimizer.step()
        optimizer.zero_grad()
        if recipe == "tensorwise":
            precompute_float8_dynamic_scale_for_fsdp(model)
    for name, p in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        record.add(name, getattr(p._local_tensor, "_tensor", p))
    return record.values


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("tensorwise", ("clipped", "checkpointed")),
        ("tensorwise", ("compiled", "in backward")),
        ("rowwise", ("compiled", "clipped")),
        ("rowwise_with_gw_hp", ("checkpointed", "in backward")),
    ],
    ids=str,
)
def test_training_equals_fsdp2(pool_of, recipe, how):
    pool = pool_of(2)
    assert_trains_as_fsdp2(pool, train, recipe, how)


def test_what_is_lowtides_own_goes_together(pool_of):
    """Without logits the bits are those of a head by rows, however it is trained."""
    pool = pool_of(2)
    rest = ("without logits", "in backward", "checkpointed")
    for mine, other in zip(
        pool.run(train, "lowtide", "tensorwise", rest),
        pool.run(train, "lowtide", "tensorwise", ("without logits",)),
        strict=True,
    ):
        assert_same_records(mine, other)
