"""``lowtide.wrap`` finds the units a careful user would, and trains with the bits of
FSDP2 wrapped by hand."""

from __future__ import annotations

import contextlib
import copy
import io
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.bits import assert_same_traces
from support.models import MODELS
from support.systems import get_system
from support.training import Trace, local_grads, local_params

NUM_STEPS = 3


def train(system_name: str, name: str, **settings: Any) -> tuple[Trace, list[str], str]:
    """The trace, which modules are units, and what `wrap` printed."""
    spec = MODELS[name]
    system = get_system(system_name)
    torch.manual_seed(7)
    model = spec.build()
    printed = io.StringIO()
    if system_name == "lowtide":
        import lowtide

        with contextlib.redirect_stdout(printed):
            assert lowtide.wrap(model, **settings) is model
    else:
        for unit in spec.units:
            system.fully_shard(model.get_submodule(unit))
        system.fully_shard(model)
        system.prepare(model)
    units = [n for n, m in model.named_modules() if isinstance(m, system.FSDPModule)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    trace = Trace()
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = spec.loss(model, generator)
        loss.backward()
        trace.losses.append([loss.item()])
        trace.grads.append(local_grads(model))
        optimizer.step()
        optimizer.zero_grad()
        trace.params.append(local_params(model))
    return trace, units, printed.getvalue()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_model_trains_as_wrapped_by_hand(pool_of, name, num_ranks):
    pool = pool_of(num_ranks)
    ours = pool.run(train, "lowtide", name, defer_logits=False)
    theirs = pool.run(train, "fsdp2", name)
    for trace, units, _ in ours:
        assert set(units) == {"", *MODELS[name].units}
        assert len(trace.losses) == NUM_STEPS
    assert_same_traces([one[0] for one in ours], [one[0] for one in theirs])
    assert [bool(printed) for _, _, printed in ours] == [True] + [False] * (
        num_ranks - 1
    )


@pytest.mark.parametrize("name", ["llama", "qwen3_tied", "mixtral"])
def test_logits_of_a_known_loss_are_deferred(pool_of, name):
    """A loss in the forward, an auxiliary one of experts beside it."""
    pool = pool_of(2)
    ours = pool.run(train_deferred, name)
    theirs = pool.run(train, "fsdp2", name)
    for (trace, _, tally), (wanted, _, _) in zip(ours, theirs, strict=True):
        assert tally == (NUM_STEPS, NUM_STEPS, 0)
        torch.testing.assert_close(trace.losses, wanted.losses, rtol=1e-4, atol=1e-4)
        for mine, other in zip(trace.grads, wanted.grads, strict=True):
            for one in mine:
                torch.testing.assert_close(mine[one], other[one], rtol=1e-3, atol=1e-4)
    said = (
        "\n  lm_head: logits are deferred, the loss is transformers' ForCausalLMLoss: "
        "defer_logits=False makes them\n"
    )
    assert [said in printed for _, printed, _ in ours] == [True, False]


def train_deferred(name: str) -> tuple[Trace, str, tuple[int, int, int]]:
    from lowtide.losses import _heads

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "lowtide: deferred logits")
        trace, _, printed = train("lowtide", name)
    tally = list(_heads._tallies.values())[-1]
    return trace, printed, (tally.calls, tally.losses, tally.made.total())


def looked_at(when: str) -> str:
    """What ``wrap`` printed and did to logits that a program looks at."""
    import lowtide

    model = MODELS["llama"].build()
    plain = copy.deepcopy(model)
    with contextlib.redirect_stdout(io.StringIO()):
        lowtide.wrap(model)
    ids = torch.arange(6).view(1, 6)
    output = model(input_ids=ids, labels=ids, use_cache=False)
    if when == "before":
        with pytest.warns(UserWarning, match="Tensor.argmax needs the logits"):
            mine = output.logits.argmax(-1)
        assert torch.equal(mine, plain(input_ids=ids).logits.argmax(-1))
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    try:
        return str(output.logits.argmax(-1).tolist())
    except RuntimeError as error:
        return str(error)


def test_logits_that_are_looked_at(pool_of):
    (seen,) = pool_of(1).run(looked_at, "before")
    assert seen.startswith("[[")
    (seen,) = pool_of(1).run(looked_at, "after the step")
    assert "got it written to since. Look at the logits before" in seen


def generates() -> bool:
    import lowtide

    model = MODELS["llama"].build().eval()
    plain = copy.deepcopy(model)
    with contextlib.redirect_stdout(io.StringIO()):
        lowtide.wrap(model)
    ids, settings = torch.arange(6).view(1, 6), {"max_new_tokens": 4, "pad_token_id": 0}
    with pytest.warns(UserWarning, match="Tensor.to \\(a copy\\) needs the logits"):
        mine = model.generate(ids, do_sample=False, **settings)
    return torch.equal(mine, plain.generate(ids, do_sample=False, **settings))


def test_a_model_with_deferred_logits_generates(pool_of):
    assert pool_of(1).run(generates) == [True]


def gpt(**settings: Any) -> str:
    """Not a model of transformers: a loss that nobody can know."""
    import lowtide

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        lowtide.wrap(Net(), **settings)
    return printed.getvalue()


def test_other_losses_are_left_alone_unless_told(pool_of):
    assert "deferred" not in pool_of(1).run(gpt)[0]
    assert (
        "  head: logits are deferred, as you told\n"
        in (pool_of(1).run(gpt, defer_logits=True)[0])
    )


def experts_used() -> set[int]:
    """By this rank's tokens of the first step above, in Mixtral's first block."""
    spec = MODELS["mixtral"]
    torch.manual_seed(7)
    model = spec.build()
    chosen: list[torch.Tensor] = []
    gate = model.model.layers[0].mlp.gate
    gate.register_forward_hook(lambda module, args, out: chosen.append(out[-1]))
    spec.loss(model, torch.Generator().manual_seed(dist.get_rank()))
    return set(chosen[0].flatten().tolist())


def test_some_of_mixtrals_experts_are_unused_on_a_rank(pool_of):
    assert pool_of(2).run(experts_used) == [{2, 3}, {0, 1, 2, 3}]


class Net(torch.nn.Module):
    """An embedding, four blocks of which two share a weight, a small tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 8)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
            for _ in range(4)
        )
        self.blocks[3][0].weight = self.blocks[1][0].weight
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 32, bias=False)
        self.probe = torch.nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input=ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + self.probe(x)


PRINTED = """\
lowtide.wrap: Net, 7 units over 2 ranks; compute bfloat16, reduce float32
  embed: a large embedding of its own, 256 parameters
  blocks.0 to blocks.3: 4 times a repeated Sequential, 72 parameters each
  head: a large linear layer of its own, 256 parameters
  the root: 25 parameters, gathered for a whole step
    probe: small beside a block
    blocks.1.0.weight = blocks.3.0.weight: tied, gathered once for all of them
"""

PRINTED_WITHOUT_BLOCKS = """\
lowtide.wrap: Sequential, 1 unit over 2 ranks
  the root: 27 parameters, gathered for a whole step
    no repeated blocks found: name modules with units=[...]
"""


def wrap_printing(kind: str) -> str:
    import lowtide
    from lowtide import MixedPrecisionPolicy

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if kind == "net":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            lowtide.wrap(Net(), mp_policy=policy)
        else:
            conv = torch.nn.Conv1d(2, 3, 4, bias=True)
            lowtide.wrap(torch.nn.Sequential(conv))
    return printed.getvalue()


def test_decision_is_printed_with_its_reasons(pool_of):
    assert pool_of(2).run(wrap_printing, "net") == [PRINTED, ""]
    assert pool_of(2).run(wrap_printing, "conv") == [PRINTED_WITHOUT_BLOCKS, ""]


def wrap_with(**settings: Any) -> tuple[list[str], list[str], str]:
    """Which modules became units and regions, or the error."""
    import lowtide
    from lowtide._activation.regions import region_state

    model = settings.pop("model", None) or Net()
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            lowtide.wrap(model, **settings)
        except ValueError as error:
            return [], [], str(error)
    model(torch.arange(4).view(1, 4)).sum().backward()
    modules = list(model.named_modules())
    units = [n for n, m in modules if isinstance(m, lowtide.FSDPModule)]
    return units, [n for n, m in modules if region_state(m)], ""


def test_named_units_are_taken_instead(pool_of):
    for units, regions, error in pool_of(2).run(wrap_with, units=["blocks.0", "norm"]):
        assert units == ["", "blocks.0", "norm"]
        assert (regions, error) == ([], "")


def test_activation_policy_goes_to_every_block(pool_of):
    from lowtide import ActivationPolicy

    policy = ActivationPolicy(save=["input"])
    for units, regions, _ in pool_of(2).run(wrap_with, activations=policy):
        assert regions == [f"blocks.{i}" for i in range(4)]
        assert len(units) == 7


def notes_on_the_cache(use_cache: bool, activations: bool) -> int:
    import lowtide

    model: Any = Net()
    model.config = types.SimpleNamespace(use_cache=use_cache)
    policy = lowtide.ActivationPolicy() if activations else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        lowtide.wrap(model, activations=policy)
    return printed.getvalue().count("set model.config.use_cache = False to train")


def test_a_cache_that_blocks_would_fill_twice_is_mentioned(pool_of):
    pool = pool_of(2)
    assert pool.run(notes_on_the_cache, True, True) == [1, 0]
    assert pool.run(notes_on_the_cache, True, False) == [0, 0]
    assert pool.run(notes_on_the_cache, False, True) == [0, 0]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no head": (
        {"defer_logits": True, "model": torch.nn.Sequential(torch.nn.Linear(4, 4))},
        "lowtide: wrap: defer_logits=True: expected one nn.Linear with an output for "
        "each row of its embedding in Sequential, got none. Name the layer that makes "
        "the logits. Pass it to lowtide.defer_logits.",
    ),
    "another word": (
        {"units": "blocks"},
        "lowtide: wrap: expected units to be 'auto' or a list of module names, got "
        "'blocks'. Write units=['blocks'] to name one module.",
    ),
    "unknown name": (
        {"units": ["layers.0"]},
        "lowtide: wrap: expected the names of modules of Net, got 'layers.0', which is "
        "none. It has, for example embed, blocks.0, blocks.0.0.",
    ),
    "pattern": (
        {"units": ["blocks.?"]},
        "lowtide: wrap: expected the names of modules of Net, got 'blocks.?', which is "
        "none. Write out each name, for example blocks.0, blocks.1, blocks.2.",
    ),
    "list of blocks": (
        {"units": ["blocks"]},
        "lowtide: wrap: expected the names of modules of Net, got 'blocks', a "
        "ModuleList, which has no forward. Name the modules inside, for example "
        "blocks.0, blocks.1, blocks.2.",
    ),
    "dtype as precision": (
        {"mp_policy": torch.float16},
        "lowtide: wrap: expected mp_policy to be a MixedPrecisionPolicy, got "
        "torch.float16. Write lowtide.MixedPrecisionPolicy(param_dtype=torch.float16, "
        "reduce_dtype=torch.float32), say.",
    ),
    "policy without blocks": (
        {"units": ["blocks.0"], "activations": True},
        "lowtide: wrap: expected repeated blocks to give the activation policy to, got "
        "none. Call lowtide.checkpoint on the modules you mean.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named(pool_of, mistake):
    settings, message = MISTAKES[mistake]
    for _, _, error in pool_of(2).run(wrap_with, **settings):
        assert error == message
