"""Autograd's corners beside FSDP2: the same bits, and None where FSDP2 leaves None."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.layers import NUM_STEPS, Blocks, Pattern, blocks, data, sgd, train, wrap
from support.recorder import (
    Record,
    Recorder,
    assert_pattern_equals_fsdp2,
    assert_same_records,
    finish_step,
)
from support.systems import System, get_system


def layer_used_three_times(system: System, record: Recorder) -> None:
    model = blocks(system, (0, 1, 0, 2, 0))
    train(model, record, lambda step: model(data(step)).pow(2).sum())


def layer_unused_everywhere(system: System, record: Recorder) -> None:
    model = blocks(system, (0, 2))
    train(model, record, lambda step: model(data(step)).pow(2).sum())
    assert all(p.grad is None for p in model.layers[1].parameters())


def layer_used_in_some_steps(system: System, record: Recorder) -> None:
    model = blocks(system)
    optimizer = sgd(model)
    for step in range(4):
        model.calls = (0, 1, 2) if step % 2 else (2, 0)
        model(data(step)).pow(2).sum().backward()
        finish_step(model, optimizer, record)


def no_grad_forward_between(system: System, record: Recorder) -> None:
    model = blocks(system)

    def loss(step: int) -> torch.Tensor:
        value = model(data(step)).pow(2).sum()
        with torch.no_grad():
            record.add("teacher", model(data(step + 7)))
        return value

    train(model, record, loss)


def eval_between(system: System, record: Recorder) -> None:
    model = blocks(system)

    def loss(step: int) -> torch.Tensor:
        value = model(data(step)).pow(2).sum()
        model.eval()
        with torch.inference_mode():
            record.add("eval", model(data(step + 7)).clone())
        model.train()
        return value

    train(model, record, loss)


def gradient_of_the_input_alone(system: System, record: Recorder) -> None:
    """torch.autograd.grad and backward(inputs=) leave every `.grad` as it was."""
    model = blocks(system)
    for step in range(NUM_STEPS):
        x = data(step, grad=True)
        (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), x)
        record.add("grad", gradient)
        record.add_model(model)
        x = data(step, grad=True)
        model(x).pow(2).sum().backward(inputs=[x])
        record.add("x.grad", x.grad)
        record.add_model(model)
    train(model, record, lambda step: model(data(step)).pow(2).sum())


def gradient_penalty_without_graph(system: System, record: Recorder) -> None:
    model = blocks(system)

    def loss(step: int) -> torch.Tensor:
        x = data(step, grad=True)
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y.pow(2).sum() + gradient.norm()

    train(model, record, loss)


def retained_three_times(system: System, record: Recorder) -> None:
    model = blocks(system)
    for step in range(NUM_STEPS):
        loss = model(data(step)).pow(2).sum()
        for last in (False, False, True):
            loss.backward(retain_graph=not last)
        record.add_model(model)
        model.zero_grad()


class Convolutions(nn.Module):
    """Channels last, a transposed and an expanded gradient, a sliced weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.mix = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        z = y @ self.mix[:, ::2] + (self.mix.t() @ y.t()).t()[:, :3]
        return z.sum() + self.scale.expand(7, 4).sum()


def gradients_of_any_layout(system: System, record: Recorder) -> None:
    torch.manual_seed(0)
    model: Any = Convolutions()
    model = wrap(system, model, [model.conv])

    def loss(step: int) -> torch.Tensor:
        return model(data(step)[:, :, None, None].expand(3, 5, 6, 6)[:, :3] * 1.5)

    train(model, record, loss)


class Answer(NamedTuple):
    main: torch.Tensor
    rest: dict[str, list[torch.Tensor]]


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, *, x: torch.Tensor, scale: float = 1.0) -> Answer:
        y = self.layers[0](x)
        return Answer(y * scale, {"more": [self.layers[1](y), y.detach()]})


def keywords_and_nested_outputs(system: System, record: Recorder) -> None:
    torch.manual_seed(0)
    model: Any = KeywordOnly()
    model = wrap(system, model, model.layers)

    def loss(step: int) -> torch.Tensor:
        answer = model(x=data(step), scale=0.5)
        assert type(answer) is Answer
        return answer.main.sum() + answer.rest["more"][0].pow(2).sum()

    train(model, record, loss)


def checkpointing(around: bool, reentrant: bool) -> Pattern:
    def pattern(system: System, record: Recorder) -> None:
        torch.manual_seed(0)
        model: Any = Blocks()
        if around:
            model.wrap_call = lambda layer, x: checkpoint(
                layer, x, use_reentrant=reentrant
            )
        else:
            for layer in model.layers:
                inner = layer.forward
                layer.forward = lambda x, inner=inner: checkpoint(
                    inner, x, use_reentrant=reentrant
                )
        model = wrap(system, model, model.layers)
        # Re-entrant checkpointing needs an input that requires grad.
        train(model, record, lambda step: model(data(step, grad=True)).pow(2).sum())

    pattern.__name__ = (
        f"{'re-entrant' if reentrant else 'non-re-entrant'}_checkpoint_"
        f"{'around' if around else 'inside'}"
    )
    return pattern


def mixed_with_plain_autograd(system: System, record: Recorder) -> None:
    """A parameter outside of the sharded model, and a detached branch."""
    model = blocks(system)
    scale = torch.ones(5, requires_grad=True)

    def loss(step: int) -> torch.Tensor:
        y = model(data(step)) * scale
        return y.sum() + y.detach().pow(2).sum()

    train(model, record, loss)
    record.add("scale.grad", scale.grad)


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        layer_used_three_times,
        layer_unused_everywhere,
        layer_used_in_some_steps,
        no_grad_forward_between,
        eval_between,
        gradient_of_the_input_alone,
        gradient_penalty_without_graph,
        retained_three_times,
        gradients_of_any_layout,
        keywords_and_nested_outputs,
        checkpointing(around=True, reentrant=True),
        checkpointing(around=True, reentrant=False),
        checkpointing(around=False, reentrant=True),
        checkpointing(around=False, reentrant=False),
        mixed_with_plain_autograd,
    )
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_equals_fsdp2(pool_of, pattern, num_ranks):
    assert_pattern_equals_fsdp2(pool_of(num_ranks), __name__, pattern)


def many_microbatches(system_name: str) -> Record:
    system = get_system(system_name)
    model = blocks(system)
    record = Recorder()
    for microbatch in range(128):
        model.set_requires_gradient_sync(microbatch == 127)
        model(data(microbatch)).pow(2).sum().backward()
    record.add_model(model)
    return record.values


def test_128_microbatches_on_one_rank(pool_of):
    pool = pool_of(1)
    assert_same_records(
        pool.run(many_microbatches, "lowtide")[0],
        pool.run(many_microbatches, "fsdp2")[0],
    )
