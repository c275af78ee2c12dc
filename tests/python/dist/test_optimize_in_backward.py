"""``lowtide.optimize_in_backward``: the bits of the same optimizer behind the backward,
or an error that says why not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.utils._pytree import tree_map

import lowtide
from lowtide.stepping import StepUndone
from support import optimizers as known
from support.bits import assert_same_tensors
from support.bombs import Boom
from support.layers import blocks, data
from support.model import ModelConfig, batch, loss_fn
from support.optimizers import OPTIMIZERS, compiling, config_of, groups
from support.saving import SMALL, backward, make
from support.systems import get_system

STEPS = 3


class ByNorm(torch.optim.Optimizer):
    """What it does takes whole parameters: with DTensors, collectives."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


MORE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "by norm": lambda m: ByNorm(groups(m)),
    "nadam": lambda m: torch.optim.NAdam(groups(m), lr=1e-2),
    "dampened": lambda m: torch.optim.SGD(groups(m), lr=1e-2, momentum=0.9),
}
KINDS = OPTIMIZERS | MORE
OF_ROWS = ("local parameters", "transformers")  # which only lowtide has


def microbatches(
    model: Any, step: int, config: ModelConfig, number: int = 2
) -> torch.Tensor:
    """All but the last without sync."""
    for i in range(number):
        model.set_requires_gradient_sync(i == number - 1)
        inputs, targets = batch(config, step, i, dist.get_rank())
        loss = loss_fn(model(inputs), targets)
        loss.backward()
    return loss.detach()


def train(name: str, system: str, in_backward: bool, **settings: Any) -> dict[str, Any]:
    """With a schedule and two groups, microbatches without sync and a sharded head."""
    config = config_of(name)
    with compiling("torchao", []):
        model, _ = make(config=config, system=system)
        optimizer = KINDS[name](model)
        if in_backward:
            assert lowtide.optimize_in_backward(model, optimizer) is optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(STEPS):
            microbatches(model, step, config)
            if in_backward:
                assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return everything(model, optimizer)


@pytest.mark.parametrize("name", [n for n in KINDS if n != "torchao, compiled"])
def test_units_get_the_bits_of_the_step_behind(pool_of, name):
    pool = pool_of(2)
    system = "lowtide" if name in OF_ROWS else "fsdp2"
    theirs = pool.run(train, name, system, False, timeout=60)
    ours = pool.run(train, name, "lowtide", True, timeout=60)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_tensors(mine, other, "")


# -- programs -------------------------------------------------------------------------


class Twice(nn.Module):
    """A layer that runs twice, a weight that is tied over units, one that is used
    sometimes, one that is never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.own = nn.Parameter(torch.ones(5))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, some: bool) -> torch.Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        x = torch.tanh(self.layers[1](x)) * self.own
        if some:
            x = torch.tanh(self.layers[2](x))
        return torch.tanh(self.layers[3](x))


def run_twice(**settings: Any) -> Any:
    torch.manual_seed(0)
    model = Twice()
    for layer in (model.layers[0], model.layers[1]):
        lowtide.fully_shard(layer, **settings)
    model.layers[1].bias.requires_grad_(False)
    return lowtide.fully_shard(model, **settings)


def programs(kind: str, in_backward: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if kind == "kept":
        settings["reshard_after_forward"] = False
    if kind == "replicas":
        shape = (2, dist.get_world_size() // 2)
        settings["mesh"] = dist.init_device_mesh("cpu", shape)
    model = run_twice(**settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if in_backward:
        lowtide.optimize_in_backward(model, optimizer)
    if kind == "kept":
        model.set_reshard_after_backward(False)
    found = {}
    for step in range(4):
        # On other ranks in other steps; in the last one on none.
        some = step < 3 and (step + dist.get_rank()) % 2 == 0
        if kind == "replicas":
            model.set_requires_all_reduce(step != 1)
        loss = model(data(step), some).pow(2).sum()
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        if kind != "replicas" or step != 1:
            optimizer.step()
            optimizer.zero_grad()
        # Between a step and the next nothing that is still gathered is old.
        with torch.no_grad():
            found[f"eval {step}"] = model(data(9), True)
    return found | everything(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "ranks"), [("plain", 2), ("kept", 1), ("kept", 2), ("replicas", 4)]
)
def test_programs_end_with_the_same_bits(pool_of, kind, ranks):
    pool = pool_of(ranks)
    theirs = pool.run(programs, kind, False)
    ours = pool.run(programs, kind, True)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_tensors(mine, other, "")


# -- clipping -------------------------------------------------------------------------

MAX_NORM = 0.3


def train_clipped(system: str, how: str) -> dict[str, Any]:
    model, _ = make(system=system)
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    if how in ("exact", "late"):
        optimizer = lowtide.optimize_in_backward(
            model, torch.optim.AdamW, max_norm=MAX_NORM, clip=how, **settings
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    found: dict[str, Any] = {}
    before = None
    for step in range(STEPS):
        microbatches(model, step, SMALL)
        if how == "behind":
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        elif how == "rule of late":
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
            scaled_by = norm if before is None else before
            nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, scaled_by)
            before = norm
        optimizer.step()
        if how in ("exact", "late"):
            norm = optimizer.grad_norm
        found[f"norm {step}"] = (
            norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        )
        assert found[f"norm {step}"] > MAX_NORM
        optimizer.zero_grad()
    return found | everything(model, optimizer)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("how", "rule", "system"),
    [("exact", "behind", "fsdp2"), ("late", "rule of late", "fsdp2")],
)
def test_clipped_steps_have_the_bits_of_torchs(pool_of, how, rule, system, ranks):
    pool = pool_of(ranks)
    theirs = pool.run(train_clipped, system, rule)
    ours = pool.run(train_clipped, "lowtide", how)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_tensors(mine, other, "")


def skip_a_parked_step() -> dict[str, Any]:
    """A step that ``zero_grad`` drops, and one whose backward raises."""
    found = {}
    for skips in (False, True):
        model, _ = make()
        optimizer = lowtide.optimize_in_backward(
            model, torch.optim.AdamW, max_norm=MAX_NORM, lr=1e-2
        )
        backward(model, 0)
        optimizer.step()
        if skips:
            backward(model, 5)
            optimizer.zero_grad()
            with pytest.raises(Boom):
                raise_in_backward(model, at=1)
        backward(model, 1)
        optimizer.step()
        found[str(skips)] = everything(model, optimizer)
    return found


def test_parked_gradients_are_dropped_with_their_step(pool_of):
    for found in pool_of(2).run(skip_a_parked_step):
        assert_same_tensors(found["True"], found["False"], "")


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    found = known.everything(model, optimizer)
    del found["generator"]
    return found


def copied(state: Any) -> Any:
    return tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, state)


# -- what raises ----------------------------------------------------------------------


def raise_in_backward(model: Any, at: int) -> None:
    """In the backward of layer ``at``, behind that of the ones after it."""

    def boom(*args: Any) -> None:
        raise Boom

    handle = model.layers[at].register_full_backward_pre_hook(boom)
    try:
        backward(model, 5)
    finally:
        handle.remove()


def torn() -> list[str]:
    model, _ = make(wrapping="blocks")
    optimizer = lowtide.optimize_in_backward(model, torch.optim.AdamW, lr=1e-2)
    backward(model, 0)
    optimizer.step()
    kept = everything(model, optimizer)
    states = [copied(model.state_dict()), copied(optimizer.state_dict())]
    with pytest.raises(Boom):
        raise_in_backward(model, at=0)
    errors = []
    for go_on in (
        optimizer.step,
        optimizer.state_dict,
        lambda: backward(model, 1),
        lambda: lowtide.save("nowhere", model, optimizer),
    ):
        with pytest.raises(RuntimeError, match="came|come to their end") as raised:
            go_on()
        errors.append(str(raised.value))
    lowtide.abort_step(model)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    assert_same_tensors(everything(model, optimizer), kept, "")
    backward(model, 1)
    optimizer.step()
    return errors


def test_a_backward_that_raised_midway_is_not_forgotten(pool_of):
    for errors in pool_of(2).run(torn):
        assert all("layers.1" in error for error in errors), errors


def broken_step(model: Any, optimizer: Any, whole: bool, breaks: bool) -> None:
    with lowtide.step(model, optimizer):
        if whole:
            backward(model, 7)
        optimizer.step()
        if breaks:
            raise Boom


def undo(clip: str | None) -> None:
    """Blocks that raise in the middle of a backward, and of a step that is parked."""
    settings: dict[str, Any] = {} if clip is None else {"max_norm": 0.3, "clip": clip}
    ends = []
    for breaks in (False, True):
        model, _ = make(wrapping="blocks")
        optimizer = lowtide.optimize_in_backward(
            model, torch.optim.AdamW, lr=1e-2, **settings
        )
        for step in range(2):
            if breaks:
                before = everything(model, optimizer)
                norm = optimizer.grad_norm
                last = dist.get_rank() == 1
                with pytest.raises(Boom if last else StepUndone):
                    broken_step(model, optimizer, whole=True, breaks=last)
                with pytest.raises(Boom), lowtide.step(model, optimizer):
                    raise_in_backward(model, at=0)
                assert_same_tensors(everything(model, optimizer), before, "")
                assert optimizer.grad_norm is norm
            backward(model, step)
            if breaks:
                with pytest.raises(Boom):
                    broken_step(model, optimizer, whole=False, breaks=True)
            optimizer.step()
        ends.append(everything(model, optimizer))
    assert_same_tensors(*ends, "")


@pytest.mark.parametrize("clip", [None, "exact", "late"])
def test_blocks_of_step_undo_what_backward_has_stepped(pool_of, clip):
    pool_of(2).run(undo, clip)


def refusals() -> None:
    raises = functools.partial(pytest.raises, RuntimeError)
    model, _ = make()
    optimizer = lowtide.optimize_in_backward(model, torch.optim.AdamW, lr=1e-2)
    backward(model, 0)
    for clip in (nn.utils.clip_grad_norm_, lowtide.clip_grad_norm_):
        for parameters in (model.parameters(), lowtide.local_parameters(model)):
            with raises(match="optimize_in_backward max_norm= to clip"):
                clip(parameters, 1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with raises(match="_unscale_grads_.*GradScaler"):
        scaler.step(optimizer)
    before = everything(model, optimizer)
    with raises(match=r"expected optimizer\.step\(\) behind each backward"):
        backward(model, 1)
    lowtide.abort_step(model)
    assert_same_tensors(everything(model, optimizer), before, "")
    with pytest.raises(ValueError, match="steps in it already"):
        lowtide.optimize_in_backward(model, optimizer)
    with pytest.raises(ValueError, match="without a unit"):
        lowtide.optimize_in_backward(nn.Linear(2, 2), torch.optim.SGD)

    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1

    model, _ = make()
    with pytest.raises(ValueError, match="LBFGS, which asks for closure"):
        lowtide.optimize_in_backward(model, torch.optim.LBFGS)
    ends = lowtide.optimize_in_backward(model, Counts, lr=1e-2)
    assert isinstance(ends, Counts)
    with raises(match="Counts, whose step changes its groups, too: 'k'"):
        backward(model, 0)


def test_what_can_not_be_exact_raises_by_name(pool_of):
    pool_of(2).run(refusals)


# -- state dicts, sleep ---------------------------------------------------------------


def resume(folder: str) -> None:
    """By torch's functions and by lowtide's, from and to a step behind the backward."""
    model, optimizer = make()
    train_on = functools.partial(steps_of, steps=range(2, 4))
    steps_of(model, optimizer, range(2))
    state = copied(dcp.get_optimizer_state_dict(model, optimizer))
    weights = copied(dcp.get_model_state_dict(model))
    lowtide.save(folder, model, optimizer)
    train_on(model, optimizer)
    expected = everything(model, optimizer)
    for how in ("torch", "lowtide"):
        other, _ = make(seed=1)
        ours = lowtide.optimize_in_backward(other, torch.optim.AdamW, lr=1e-2)
        if how == "torch":
            dcp.set_model_state_dict(other, weights)
            dcp.set_optimizer_state_dict(other, ours, copied(state))
            again = dcp.get_optimizer_state_dict(other, ours)
            assert again["param_groups"] == state["param_groups"]
        else:
            lowtide.load(folder, other, ours)
        lowtide.sleep(other, ours)
        lowtide.wake(other, ours)
        train_on(other, ours)
        assert_same_tensors(everything(other, ours), expected, "")


def steps_of(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def test_states_cross_to_and_from_a_step_behind_the_backward(pool_of, tmp_path):
    pool_of(2).run(resume, str(tmp_path / "saved"))


def order() -> list[str]:
    """A user's hooks see their gradients before a unit's are taken."""
    model = blocks(get_system("lowtide"))
    events: list[str] = []
    for i, layer in enumerate(model.layers):
        layer.register_full_backward_hook(
            lambda *_, i=i: events.append(f"backward {i}")
        )
        for p in (layer.weight, layer.bias):

            def seen(p: Any, i: int = i) -> None:
                assert p.grad is not None
                events.append(f"gradient {i}")

            p.register_post_accumulate_grad_hook(seen)
    optimizer = lowtide.optimize_in_backward(model, torch.optim.SGD, lr=0.1)
    before = [layer.weight.to_local().clone() for layer in model.layers]

    def stepped(i: int) -> None:
        changed = [
            not torch.equal(layer.weight.to_local(), old)
            for layer, old in zip(model.layers, before, strict=True)
        ]
        events.append(f"stepped before {i}: {changed}")

    for i, layer in enumerate(model.layers):
        layer.register_full_backward_pre_hook(lambda *_, i=i: stepped(i))
    model(data(0, grad=True)).pow(2).sum().backward()
    optimizer.step()
    return events


def test_a_unit_is_stepped_before_the_next_ones_backward(pool_of):
    for events in pool_of(2).run(order):
        stepped = [event for event in events if "stepped" in event]
        assert stepped == [
            "stepped before 2: [False, False, False]",
            "stepped before 1: [False, False, True]",
            "stepped before 0: [False, True, True]",
        ]
        assert events.count("gradient 1") == 2
