"""What `bind` and a session of `lowtide run` put in torch's place, and refuse."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

import lowtide
from lowtide.integrations import bind
from lowtide.integrations.binding import TORCH_PATHS
from lowtide.integrations.policy_text import EXAMPLE, parse_policy
from lowtide.integrations.session import Session
from lowtide.policies import ActivationPolicy

COMPANIONS = {
    *("FSDPModule", "UnshardHandle", "MixedPrecisionPolicy", "OffloadPolicy"),
    *("CPUOffloadPolicy", "register_fsdp_forward_method", "share_comm_ctx"),
}


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A framework that took the function, under a name of its own, before."""
    module = ModuleType("early_framework")
    module.shard = fsdp.fully_shard  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "early_framework", module)
    return module


def test_bind_replaces_the_function_everywhere_and_undoes_it(early):
    theirs = fsdp.fully_shard
    with bind() as binding:
        ours = fsdp.fully_shard
        assert ours is not theirs
        assert {*TORCH_PATHS, "early_framework"} <= set(binding.places)
        for name in TORCH_PATHS:
            assert sys.modules[name].fully_shard is ours
        assert early.shard is ours
        late = ModuleType("late_framework")
        exec("from torch.distributed._composable.fsdp import fully_shard", vars(late))
        sys.modules["late_framework"] = late
        assert late.fully_shard is ours and "late_framework" in binding.users()
        assert ours.state is lowtide.fully_shard.state
    assert all(sys.modules[name].fully_shard is theirs for name in TORCH_PATHS)
    assert early.shard is theirs and sys.modules.pop("late_framework").fully_shard is (
        theirs
    )


def test_its_companions_are_torchs_own_or_derived_from_them():
    for name in COMPANIONS:
        mine, theirs = getattr(lowtide, name), getattr(fsdp, name)
        assert mine is theirs or issubclass(mine, theirs)
    composable = importlib.import_module("torch.distributed._composable.fsdp")
    assert composable.FSDPModule is fsdp.FSDPModule


# -- what a session refuses, on a rank of its own -----------------------------------


@contextlib.contextmanager
def session(policy: str | None = None) -> Iterator[Session]:
    begun = Session(policy)
    try:
        yield begun
    finally:
        begun.end()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gradient_checkpointing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def blocks() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(3)))


def fsdp1() -> None:
    with session():
        fsdp.FullyShardedDataParallel(nn.Linear(4, 4))


def parameter_offload() -> None:
    with session():
        fsdp.fully_shard(nn.Linear(4, 4), offload_policy=fsdp.CPUOffloadPolicy())


def policy_without_blocks() -> None:
    with session("recompute"):
        model = nn.Linear(4, 4)
        fsdp.fully_shard(model)
        model(torch.ones(2, 4))


def policy_on_wrapped_blocks() -> None:
    with session("recompute"):
        model = nn.Sequential(*(checkpoint_wrapper(block) for block in blocks()))
        fsdp.fully_shard(model)
        model(torch.ones(2, 4))


def policy_beside_transformers() -> None:
    with session("offload=input"):
        model = blocks()
        model[1].gradient_checkpointing = True
        fsdp.fully_shard(model)
        model(torch.ones(2, 4))


REFUSED: dict[Callable[[], None], str] = {
    fsdp1: "run: FullyShardedDataParallel: expected fully_shard, got FSDP1 around "
    "Linear. Ask the framework for FSDP2 (accelerate: fsdp_version 2; ",
    parameter_offload: "fully_shard: expected offload_policy=None, got CPUOffload",
    policy_without_blocks: "run: --policy: expected repeated blocks in Linear, got "
    "none. Leave the option out, and call lowtide.checkpoint on the modules you mean.",
    policy_on_wrapped_blocks: "run: --policy: expected blocks of Sequential that the "
    "program does not checkpoint itself, got CheckpointWrapper. Turn its ",
    policy_beside_transformers: "run: --policy: expected blocks of Sequential that the "
    "program does not checkpoint itself, got Block. Turn its ",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_what_it_can_not_serve_raises_by_name(pool_of, program):
    (outcome,) = pool_of(1).outcomes(program)
    assert outcome.kind == "error", outcome
    assert outcome.error.startswith(f"lowtide: {REFUSED[program]}")


def train_with_policy() -> tuple[int, list[bool], bool, bool]:
    with session("recompute") as begun:
        model = blocks()
        model.config = type("Config", (), {"use_cache": True})()
        for block in model:
            fsdp.fully_shard(block)
        fsdp.fully_shard(model)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        report = lowtide.memory_report(model)
        kinds = ["Checkpointed" in type(block).__name__ for block in model]
    after = fsdp.FullyShardedDataParallel.__init__.__name__
    return (
        begun.num_blocks,
        kinds,
        model.config.use_cache,
        (report.activations is not None and after == "__init__"),
    )


def test_a_policy_is_given_once_in_the_first_forward(pool_of):
    assert pool_of(1).run(train_with_policy) == [(3, [True] * 3, False, True)]


# -- the policy's text --------------------------------------------------------------


def test_a_policy_in_words():
    assert parse_policy("recompute") == ActivationPolicy()
    assert parse_policy(EXAMPLE) == ActivationPolicy(
        offload=["input"], save=["*.attn", "mlp"], keep_last=2
    )
    assert parse_policy("min_bytes=4096;recompute=a.b") == ActivationPolicy(
        min_bytes=4096, recompute=["a.b"]
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "save", "save=", "keep=x", "keep_last=two", "prefetch=-1"),
        *("save=a;save=b", "recompute;save=a", "save:a"),
    ],
)
def test_what_is_no_policy(text):
    with pytest.raises(ValueError, match=re.escape("lowtide: run: --policy: expected")):
        parse_policy(text)


def test_a_policy_refuses_what_it_refuses():
    with pytest.raises(ValueError, match=r"expected 'a' in one list, got it in save"):
        parse_policy("save=a;offload=a")
