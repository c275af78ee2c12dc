"""What `bind` and a session of `lowtide run` put in torch's place, and refuse."""

from __future__ import annotations

import contextlib
import importlib
import io
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
from lowtide.integrations.session import Options, Session
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
        assert ours.state is theirs.state  # finds lowtide's, too
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
def session(policy: str | None = None, head: str | None = None) -> Iterator[Session]:
    begun = Session(Options(policy, head))
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


def model_of(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(6, 4), *layers)


def logits_deferred_of(model: nn.Module, name: str = "") -> None:
    with session(head=name):
        fsdp.fully_shard(model)
        model(torch.ones(2, 4, dtype=torch.int64))


def head_of_a_model_without() -> None:
    logits_deferred_of(model_of(nn.Linear(4, 5)))


def head_of_a_model_with_two() -> None:
    logits_deferred_of(model_of(nn.Linear(4, 6), nn.Linear(6, 6)))


def head_by_a_wrong_name() -> None:
    logits_deferred_of(model_of(nn.Linear(4, 6)), "output")


def head_that_is_no_linear_layer() -> None:
    logits_deferred_of(model_of(nn.Linear(4, 6)), "0")


REFUSED: dict[Callable[[], None], str] = {
    fsdp1: "run: FullyShardedDataParallel: expected fully_shard, got FSDP1 around "
    "Linear. Ask the framework for FSDP2 (accelerate: fsdp_version 2; ",
    policy_without_blocks: "run: --policy: expected repeated blocks in Linear, got "
    "none. Leave the option out, and call lowtide.checkpoint on the modules you mean.",
    policy_on_wrapped_blocks: "run: --policy: expected blocks of Sequential that the "
    "program does not checkpoint itself, got CheckpointWrapper. Turn its ",
    policy_beside_transformers: "run: --policy: expected blocks of Sequential that the "
    "program does not checkpoint itself, got Block. Turn its ",
    head_of_a_model_without: "run: --defer-logits: expected one nn.Linear with an "
    "output for each row of its embedding in Sequential, got none. Name ",
    head_of_a_model_with_two: "run: --defer-logits: expected one nn.Linear with an "
    "output for each row of its embedding in Sequential, got 2: 1, 2. Name the layer "
    "that makes the logits. For example --defer-logits=output; or leave ",
    head_by_a_wrong_name: "run: --defer-logits: expected a module 'output' in "
    "Sequential, got none. Name ",
    head_that_is_no_linear_layer: "run: --defer-logits: expected Sequential.0 to be an "
    "nn.Linear with its class's forward, got Embedding. Name ",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_what_it_can_not_serve_raises_by_name(pool_of, program):
    (outcome,) = pool_of(1).outcomes(program)
    assert outcome.kind == "error", outcome
    assert outcome.error.startswith(f"lowtide: {REFUSED[program]}")


def train_with_policy() -> tuple[int, list[bool], bool, bool, int]:
    said = io.StringIO()
    with session("recompute") as begun, contextlib.redirect_stderr(said):
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
        said.getvalue().count("config.use_cache = False"),
    )


def test_a_policy_is_given_once_in_the_first_forward(pool_of):
    assert pool_of(2).run(train_with_policy) == [
        (3, [True] * 3, False, True, 1),
        (3, [True] * 3, False, True, 0),
    ]


class Net(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 8)
        self.layers = blocks()
        for block in self.layers:
            block.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 60, bias=False)
        if tied:
            self.output.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for block in self.layers:
            x = block(x)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def cross_entropy_of_a_program(
    how: str, tied: bool, head: str | None
) -> tuple[list[torch.Tensor], list[str], bool]:
    """Losses of two steps and the parameters; what is reported; whether the head is a
    unit of its own."""
    with session(head=head) as begun:
        torch.manual_seed(0)
        model = Net(tied)
        if how == "with the norm":
            fsdp.fully_shard([model.norm, model.output])
        # A loss outside of the forward needs weights that the root has let go of.
        fsdp.fully_shard(model, reshard_after_forward=how == "of the root, resharded")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for _ in range(2):
            logits = model(torch.arange(12).view(2, 6))
            targets = torch.arange(12) + torch.distributed.get_rank()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
        values += [p.full_tensor().detach() for p in model.parameters()]
        state = lowtide.fully_shard.state(model.output)
        lines = list(begun._deferral.lines()) if begun._deferral is not None else []
    return values, lines, state is not None and state.modules == (model.output,)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "how", ["with the norm", "of the root", "of the root, resharded"]
)
def test_a_head_is_deferred_wherever_the_program_shards_it(pool_of, how, tied):
    if tied and how == "of the root, resharded":
        # Its loss is outside of the only unit that it can be in.
        for outcome in pool_of(2).outcomes(cross_entropy_of_a_program, how, tied, ""):
            assert "expected the head's weight to stay gathered" in outcome.error
        return
    plain = pool_of(2).run(cross_entropy_of_a_program, how, tied, None)
    for name in ("", "output"):
        ours = pool_of(2).run(cross_entropy_of_a_program, how, tied, name)
        for (mine, lines, alone), (wanted, none, _) in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, wanted)
            assert lines == [
                "lowtide: run: --defer-logits: Net.output: 2 calls, 2 losses without "
                "logits, logits made 0 times"
            ]
            assert not none and alone is not (tied and how != "with the norm")


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
