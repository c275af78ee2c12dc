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
from torch.distributed.tensor import DTensor

import lowtide
from lowtide._sharding import blocks
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
        self.books = nn.ModuleList(nn.Embedding(100, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.emb(x)
        for layer in self.layers:
            y = layer(y)
        if self.how == "nobody's":
            return y
        if self.how == "a codebook's row":
            return y + self.books[1].weight[3]
        if self.how == "all codebooks'":
            rows = torch.stack([book.weight for book in self.books])
            y = y * 2
            return torch.where(y > 0, y, rows[0, 0])
        if self.how == "a codebook's by another function":
            return distances(y, self.books[0])
        if self.how == "a number of a codebook's":
            scale = self.books[0].weight.sum().item()
            return y * scale
        if self.how == "the embedding's":
            return F.linear(y, self.emb.weight)
        if self.how == "the head's":
            weight = self.head.weight
            return y @ weight.t()
        return self.head.forward(y)


def distances(x: torch.Tensor, book: nn.Embedding) -> torch.Tensor:
    centers = book.weight.t()
    flat = x.flatten(0, 1)
    return flat @ centers


READS = {
    "the embedding's": ("emb", "return F.linear(y, self.emb.weight)"),
    "the head's": ("head", "return y @ weight.t()"),
    "a forward called directly": ("head", "return self.head.forward(y)"),
    "a codebook's row": ("books.1", "return y + self.books[1].weight[3]"),
    "all codebooks'": (
        "books.1",
        "rows = torch.stack([book.weight for book in self.books])",
    ),
    "a codebook's by another function": ("books.0", "centers = book.weight.t()"),
}


def error_of_a_reader(
    how: str, warm_up: bool = False, by_hand: str | None = None
) -> str:
    torch.manual_seed(0)
    model: Any = ReadsWeights("nobody's" if warm_up else how)
    if by_hand is None:
        lowtide.wrap(model)
    else:
        lowtide.fully_shard(model.get_submodule(by_hand))
        lowtide.fully_shard(model)
    tokens = torch.ones(2, 4, dtype=torch.long)
    if warm_up:
        model(tokens).sum().backward()
        model.how = how
    with pytest.raises(RuntimeError) as caught:
        model(tokens)
    return str(caught.value)


def require_units_to_pass(text: str, unit: str) -> None:
    told = text.partition("pass units=[")[2].partition("] to lowtide.wrap")[0]
    assert repr("head" if unit == "emb" else "emb") in told and repr(unit) not in told
    assert "*(f'layers.{i}' for i in range(3))" in told


@pytest.mark.parametrize("how", READS)
def test_a_weight_read_outside_of_its_unit_is_named_with_the_units_to_pass(
    pool_of, how
):
    unit, code = READS[how]
    function = "distances" if "function" in how else "forward"
    for text in pool_of(2).run(error_of_a_reader, how):
        assert text.startswith(
            f"lowtide: parameter '{unit}.weight': expected to be read in a forward of "
            f"its unit '{unit}', which gathers it, got {code!r} in {function} (line "
        )
        require_units_to_pass(text, unit)
        assert "DTensor before calling distributed operators!" in text


@pytest.mark.parametrize("how", ["the embedding's", "the head's", "a codebook's row"])
def test_so_is_one_that_a_later_forward_reads(pool_of, how):
    unit, _ = READS[how]
    for text in pool_of(2).run(error_of_a_reader, how, True):
        assert text.startswith(f"lowtide: parameter '{unit}.weight': expected to be")
        require_units_to_pass(text, unit)


@pytest.mark.parametrize("how", READS)
def test_so_is_one_of_a_unit_that_nobody_let_wrap_choose(pool_of, how):
    unit, _ = READS[how]
    for text in pool_of(2).run(error_of_a_reader, how, False, unit):
        assert text.startswith(f"lowtide: parameter '{unit}.weight': expected to be")
        assert (
            "Call the unit's module itself, or shard the module that reads it and not "
            "this one. (torch: "
        ) in text


def test_a_number_of_one_ranks_rows_is_not_passed_over(pool_of):
    """torch gives it without an error."""
    for text in pool_of(2).run(error_of_a_reader, "a number of a codebook's"):
        assert text.startswith(
            "lowtide: parameter 'books.0.weight': expected the forward of its unit "
            "'books.0' to run where it is read, got 'scale = "
            "self.books[0].weight.sum().item()' in forward (line "
        )
        require_units_to_pass(text, "books.0")


def shards_in_a_forward() -> list[str]:
    """What a program may ask of a shard, and what is left of the watch."""
    seen: list[str] = []
    model = ReadsWeights("nobody's")

    def look(module: Any, *_: Any) -> None:
        weight = module.books[0].weight
        seen.extend(
            [
                f"{tuple(weight.shape)} {weight.dtype} {weight.size(0)}",
                f"{tuple(weight.to_local().shape)} {tuple(weight.full_tensor().shape)}",
                f"{isinstance(weight, DTensor)} {isinstance(weight, nn.Parameter)}",
            ]
        )

    model.layers[0].register_forward_hook(lambda *_: look(model))
    lowtide.wrap(model)
    tokens = torch.ones(2, 4, dtype=torch.long)
    for _ in range(2):
        model(tokens).sum().backward()
    seen += {type(p).__name__ for p in model.parameters()}
    return seen


def test_questions_about_a_shard_are_answered(pool_of):
    once = ["(100, 16) torch.float32 100", "(50, 16) (100, 16)", "True True"]
    for seen in pool_of(2).run(shards_in_a_forward):
        assert seen == [*once, *once, "DTensor"]
