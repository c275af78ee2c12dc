"""Which modules ``wrap`` leaves to the unit around them: those that a step may skip,
and those that nobody calls."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide._state import blocks
from support.bits import same_bits


class Parts(nn.Module):
    """Attributes of those names, called in that order."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def layers(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(layer() for _ in range(count))


def head() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def stage() -> nn.Module:
    """As autoencoders of latent diffusion have them: names without a forward."""
    stage = nn.Module()
    stage.block = layers()
    stage.down = nn.Linear(16, 16)
    return stage


def gpt() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "wte": nn.Embedding(500, 16),
            "wpe": nn.Embedding(20, 16),
            "h": layers(),
            "ln_f": nn.LayerNorm(16),
        }
    )


CHOICES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "heads of several tasks": (
        lambda: Parts(
            body=nn.Linear(16, 16), heads=nn.ModuleDict({k: head() for k in "ab"})
        ),
        ["body"],
    ),
    "linear heads of several sizes": (
        lambda: Parts(
            layers=layers(),
            heads=nn.ModuleDict({"a": nn.Linear(16, 90), "b": nn.Linear(16, 200)}),
        ),
        ["layers.0", "layers.1"],
    ),
    "towers that are most of the model": (
        lambda: Parts(
            towers=nn.ModuleDict(
                {k: nn.TransformerEncoder(layer(), 2) for k in ("image", "text")}
            ),
        ),
        [f"towers.{k}.layers.{i}" for k in ("image", "text") for i in range(2)],
    ),
    "layers under numbers": (
        lambda: Parts(layers=nn.ModuleDict({str(i): layer() for i in range(2)})),
        ["layers.0", "layers.1"],
    ),
    "layers under numbered names": (
        lambda: Parts(layers=nn.ModuleDict({f"layer{i}": layer() for i in range(2)})),
        ["layers.layer0", "layers.layer1"],
    ),
    "parts of one model under names": (
        lambda: Parts(transformer=gpt(), lm_head=nn.Linear(16, 500)),
        ["transformer.wte", "transformer.h.0", "transformer.h.1", "lm_head"],
    ),
    "blocks without a forward": (
        lambda: Parts(down=nn.ModuleList(stage() for _ in range(2))),
        [f"down.{i}.block.{j}" for i in range(2) for j in range(2)],
    ),
    "codebooks in parameter lists": (
        lambda: Parts(
            layers=layers(),
            books=nn.ModuleList(
                nn.ParameterList([nn.Parameter(torch.ones(64, 16))]) for _ in range(2)
            ),
        ),
        ["layers.0", "layers.1"],
    ),
    "attention whose projection is read": (
        lambda: Parts(attention=nn.MultiheadAttention(16, 2), head=nn.Linear(16, 16)),
        ["head"],
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_units_are_modules_that_every_step_calls(choice):
    build, units = CHOICES[choice]
    decision = blocks.decide(build(), set())
    assert [unit.name for unit in decision.units] == units


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.heads = nn.ModuleDict({name: head() for name in "ab"})

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y: torch.Tensor = self.heads[name](self.body(x))
        return y


def run_a_head_per_rank() -> tuple[str, list[bool], list[float]]:
    """Whether outputs are those of the whole model, and how far gradients are from the
    mean over what each rank would compute."""
    torch.manual_seed(0)
    model = Heads()
    x = torch.ones(4, 16)
    for name in "ab":
        (model(x, name).square().mean() / dist.get_world_size()).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    outputs = {name: model(x, name).detach() for name in "ab"}
    for parameter in model.parameters():
        parameter.grad = None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        lowtide.wrap(model)
    mine = "ab"[dist.get_rank()]
    same, apart = [], []
    for _ in range(3):
        out = model(x, mine)
        same.append(same_bits(out, outputs[mine]))
        out.square().mean().backward()
        for name, parameter in model.named_parameters():
            grad: Any = parameter.grad
            apart.append(float((grad.full_tensor() - expected[name]).abs().max()))
            parameter.grad = None
    return printed.getvalue(), same, apart


def test_ranks_may_run_different_heads(pool_of):
    values = pool_of(2).run(run_a_head_per_rank)
    for _, same, apart in values:
        assert same == [True] * 3
        assert max(apart) < 1e-7
    for name in "ab":
        note = f"heads.{name}: one of several Sequential, of which a step may run some"
        assert note in values[0][0]


def wrap_module_without_forward() -> str:
    model = Parts(down=nn.ModuleList(stage() for _ in range(2)))
    with pytest.raises(ValueError, match="no forward") as error:
        lowtide.wrap(model, units=["down.0"])
    return str(error.value)


def test_a_module_without_a_forward_is_refused_by_name(pool_of):
    assert pool_of(1).run(wrap_module_without_forward) == [
        "lowtide: wrap: expected the names of modules of Parts, got 'down.0', a "
        "Module, which has no forward. Name the modules inside, for example "
        "down.0.block.0, down.0.block.1, down.0.down."
    ]


class ReadsWeights(nn.Module):
    """As whisper's logits and codebooks read weights: of modules that do not run."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.emb = nn.Embedding(100, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(16, 100, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.emb(x)
        for layer in self.layers:
            y = layer(y)
        if self.how == "the embedding's":
            return F.linear(y, self.emb.weight)
        if self.how == "the head's":
            weight = self.head.weight
            return y @ weight.t()
        return self.head.forward(y)


READS = {
    "the embedding's": ("emb", "return F.linear(y, self.emb.weight)"),
    "the head's": ("head", "return y @ weight.t()"),
    "a forward called directly": (
        "head",
        "return F.linear(input, self.weight, self.bias)",
    ),
}


def first_forward_of_a_reader(how: str) -> str:
    torch.manual_seed(0)
    model = ReadsWeights(how)
    lowtide.wrap(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4, dtype=torch.long))
    return str(caught.value)


@pytest.mark.parametrize("how", READS)
def test_a_weight_read_outside_of_its_unit_is_named_with_the_units_to_pass(
    pool_of, how
):
    unit, code = READS[how]
    rest = ["head" if unit == "emb" else "emb"]
    for text in pool_of(2).run(first_forward_of_a_reader, how):
        assert text.startswith(
            f"lowtide: parameter '{unit}.weight': expected to be read in a forward of "
            f"its unit '{unit}', which gathers it, got {code!r} in forward (line "
        )
        told = text.partition("pass units=[")[2].partition("]")[0]
        assert repr(rest[0]) in told and repr(unit) not in told
        assert "*(f'layers.{i}' for i in range(3))" in told
        assert text.endswith("DTensor before calling distributed operators!)")
