"""User hooks fire with what FSDP2 gives them; when, where that differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.layers import NUM_STEPS, Pattern, blocks, data, train
from support.recorder import Recorder, assert_pattern_equals_fsdp2
from support.systems import System, get_system
from support.training import local


def module_and_state_dict_hooks(system: System, record: Recorder) -> None:
    model = blocks(system)
    layer = model.layers[1]

    def log(name: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            for i, value in enumerate(args):
                values = value if isinstance(value, tuple | list) else [value]
                for one in values:
                    if isinstance(one, torch.Tensor):
                        record.add(f"{name} {i} {type(one).__name__}", one)

        return hook

    layer.register_forward_pre_hook(log("forward pre"))
    layer.register_forward_hook(log("forward"))
    layer.register_full_backward_pre_hook(log("backward pre"))
    layer.register_full_backward_hook(log("backward"))
    model.register_state_dict_post_hook(lambda *args: record.add("saved", None))
    model.register_load_state_dict_pre_hook(lambda *args: record.add("loading", None))
    train(model, record, lambda step: model(data(step)).pow(2).sum())
    model.load_state_dict(model.state_dict())
    names = {name.split(" ")[0] for name, _ in record.values}
    assert names >= {"forward", "backward", "saved", "loading"}


def post_accumulate_hooks(system: System, record: Recorder) -> None:
    """With which gradient; the order of parameters is another."""
    model = blocks(system)
    found: dict[str, list[torch.Tensor]] = {n: [] for n, _ in model.named_parameters()}
    for name, p in model.named_parameters():

        def accumulated(p: Any, name: str = name) -> None:
            assert p.grad.placements == p.placements
            found[name].append(p.grad.to_local().clone())

        p.register_post_accumulate_grad_hook(accumulated)
    for step in range(NUM_STEPS):
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch > 0)
            model(data(3 * step + microbatch)).pow(2).sum().backward()
        model.zero_grad()
    for name, gradients in found.items():
        assert len(gradients) == 2 * NUM_STEPS  # not without synchronization
        for gradient in gradients:
            record.add(name, gradient)


def optimizer_in_backward(system: System, record: Recorder) -> None:
    """Each parameter is updated in its hook, which drops its gradient."""
    model = blocks(system)
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.5)

        def update(p: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(update)
    for step in range(NUM_STEPS):
        model(data(step)).pow(2).sum().backward()
        record.add_model(model)
        assert all(p.grad is None for p in model.parameters())


def hook_of_gathered(
    layer: Any, register: str, hook: Callable[[torch.Tensor], Any]
) -> None:
    """In the forward, as transformers' tensor parallelism does."""
    seen: list[Any] = []

    def watch(module: Any, args: Any) -> None:
        if not any(module.weight is one for one in seen):
            seen.append(module.weight)
            getattr(module.weight, register)(hook)

    layer.register_forward_pre_hook(watch)


def post_accumulate_hooks_of_gathered(system: System, record: Recorder) -> None:
    """They see, and may change, what is reduced."""
    model = blocks(system)
    layer, calls = model.layers[1], []

    def thrice(full: Any) -> None:
        calls.append(full is layer.weight)
        record.add("before", full.grad)
        full.grad.mul_(3)

    hook_of_gathered(layer, "register_post_accumulate_grad_hook", thrice)
    train(model, record, lambda step: model(data(step)).pow(2).sum())
    assert calls == [True] * NUM_STEPS


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        module_and_state_dict_hooks,
        post_accumulate_hooks,
        post_accumulate_hooks_of_gathered,
        optimizer_in_backward,
    )
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_hooks_get_what_fsdp2_gives_them(pool_of, pattern, num_ranks):
    assert_pattern_equals_fsdp2(pool_of(num_ranks), __name__, pattern)


def order_of_hooks(system_name: str) -> list[str]:
    """In one backward: layers that are done, and gradients that are there."""
    model = blocks(get_system(system_name))
    events: list[str] = []
    for i, layer in enumerate(model.layers):
        layer.register_full_backward_hook(
            lambda *args, i=i: events.append(f"backward {i}")
        )
        layer.weight.register_post_accumulate_grad_hook(
            lambda p, i=i: events.append(f"gradient {i}")
        )
    model(data(0, grad=True)).pow(2).sum().backward()
    return events


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_post_accumulate_hooks_fire_when_their_unit_is_reduced(pool_of, num_ranks):
    pool = pool_of(num_ranks)
    by_unit = [f"{what} {i}" for i in (2, 1, 0) for what in ("backward", "gradient")]
    assert pool.run(order_of_hooks, "fsdp2") == [by_unit] * num_ranks
    assert pool.run(order_of_hooks, "lowtide") == [by_unit] * num_ranks


def accumulated(register: str) -> list[torch.Tensor]:
    model = blocks(get_system("lowtide"))

    def thrice(of: Any) -> torch.Tensor | None:
        if register == "register_hook":
            return of * 3
        of.grad.mul_(3)
        return None

    hook_of_gathered(model.layers[1], register, thrice)
    for microbatch in range(3):
        model.set_requires_gradient_sync(microbatch == 2)
        model(data(microbatch)).pow(2).sum().backward()
    return [local(p.grad) for p in model.parameters()]


def test_hooks_of_a_gathered_parameter_see_each_microbatch_alone(pool_of):
    pool = pool_of(2)
    alone = pool.run(accumulated, "register_hook")
    ours = pool.run(accumulated, "register_post_accumulate_grad_hook")
    for mine, other in zip(ours, alone, strict=True):
        assert all(map(torch.equal, mine, other))


def gradient_taken_away() -> str:
    model = blocks(get_system("lowtide"))

    def take(full: Any) -> None:
        full.grad = None

    hook_of_gathered(model.layers[1], "register_post_accumulate_grad_hook", take)
    with pytest.raises(RuntimeError) as raised:
        model(data(0)).pow(2).sum().backward()
    return str(raised.value)


def test_a_hook_of_a_gathered_parameter_leaves_the_gradient(pool_of):
    for text in pool_of(2).run(gradient_taken_away):
        assert (
            "lowtide: layers.1.weight: expected the hooks registered on the gathered "
            "parameter with register_post_accumulate_grad_hook to leave its gradient, "
            "got None. Register on the sharded parameter, before the forward, what "
            "takes gradients away."
        ) in text
