"""Loops and models other than forward, backward, step: the same bits as FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowtide._torch_version import VERSION
from support import layers
from support.model import ModelConfig, batch, build, loss_fn
from support.recorder import Recorder, assert_pattern_equals_fsdp2, finish_step
from support.systems import System
from support.training import Run, adamw, local, shard

CONFIG = ModelConfig(dim=16, num_heads=2, ffn=22, vocab=37, num_layers=3)
NUM_STEPS = 3
BF16 = torch.bfloat16


Pattern = Callable[[System, Recorder], None]


def llama(system: System, **changes: Any) -> Any:
    run = replace(Run(CONFIG, dist.get_world_size()), **changes)
    return shard(build(run.model), run, system)


def data(step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(CONFIG, step, microbatch, dist.get_rank())


def loss_of(model: Any, step: int, microbatch: int = 0) -> torch.Tensor:
    inputs, targets = data(step, microbatch)
    return loss_fn(model(inputs), targets)


def validation_between_steps(system: System, record: Recorder) -> None:
    model = llama(system)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        model.eval()
        with torch.no_grad():
            record.add("validation", loss_of(model, 100))
        with torch.inference_mode():
            record.add("inference", loss_of(model, 101).clone())
        model.train()
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


def forward_without_backward(system: System, record: Recorder) -> None:
    model = llama(system)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        record.add("unused", loss_of(model, 50 + step).detach())
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


def two_forwards_then_two_backwards(system: System, record: Recorder) -> None:
    model = llama(system)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        first, second = loss_of(model, step, 0), loss_of(model, step, 1)
        first.backward()
        second.backward()
        finish_step(model, optimizer, record)


def two_forwards_one_backward(system: System, record: Recorder) -> None:
    model = llama(system)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        (loss_of(model, step, 0) + loss_of(model, step, 1)).backward()
        finish_step(model, optimizer, record)


def retained_graph(system: System, record: Recorder) -> None:
    model = llama(system)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        loss = loss_of(model, step)
        loss.backward(retain_graph=True)
        loss.backward()
        finish_step(model, optimizer, record)


def retained_graph_summed(system: System, record: Recorder) -> None:
    """A graph takes part in another backward together with a new one."""
    model = llama(system)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        first = loss_of(model, step, 0)
        first.backward(retain_graph=True)
        (first + loss_of(model, step, 1)).backward()
        finish_step(model, optimizer, record)


def no_sync_steps_of_changing_length(system: System, record: Recorder) -> None:
    model = llama(system)
    optimizer = adamw(model)
    for step, microbatches in enumerate((3, 1, 2, 3)):
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
            loss_of(model, step, microbatch).backward()
        finish_step(model, optimizer, record)


def layers_left_out(system: System, record: Recorder) -> None:
    """The microbatch that reduces does not use what an earlier one did."""
    model = llama(system)
    layers = model.layers
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            model.layers = layers[: 3 - (microbatch + step) % 3]
            loss_of(model, step, microbatch).backward()
            model.layers = layers
        finish_step(model, optimizer, record)


def forwards_of_other_layers_first_in_first_out(
    system: System, record: Recorder
) -> None:
    """As a pipeline runs them, of layers that each forward picks."""
    model = layers.blocks(system)
    optimizer = layers.sgd(model)
    for step, picked in enumerate(((1, 2), (1, 2, 0), (2, 1))):
        losses = []
        for microbatch, calls in enumerate(((0,), picked)):
            model.calls = calls
            x = layers.data(2 * step + microbatch)
            losses.append(model(x).square().sum())
        for microbatch, loss in enumerate(losses):
            model.set_requires_gradient_sync(microbatch == 1)
            loss.backward()
        finish_step(model, optimizer, record)


def sync_of_some_units(system: System, record: Recorder) -> None:
    """The middle block's gradients stay local for one microbatch."""
    model = llama(system)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        for last in (False, True):
            model.layers[1].set_requires_gradient_sync(last)
            loss_of(model, step, int(last)).backward()
        finish_step(model, optimizer, record)


def parameters_frozen_later(system: System, record: Recorder) -> None:
    model = llama(system)
    optimizer = adamw(model)
    for step in range(4):
        for p in model.layers[0].parameters():
            p.requires_grad_(step in (0, 3))
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


def tied_in_the_root(system: System, record: Recorder) -> None:
    run = Run(CONFIG, dist.get_world_size())
    plain = build(CONFIG)
    plain.head.weight = plain.embed.weight
    model: Any = shard(plain, run, system)
    assert model.head.weight is model.embed.weight
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


def block_called_twice(system: System, record: Recorder) -> None:
    """The first block also runs last: one unit, two calls in one forward."""
    run = Run(CONFIG, dist.get_world_size())
    plain = build(CONFIG)
    plain.layers.append(plain.layers[0])
    for layer in plain.layers[:-1]:
        system.fully_shard(layer, mp_policy=policy(system, run))
    system.fully_shard(plain, mp_policy=policy(system, run))
    system.prepare(plain)
    optimizer = adamw(plain)
    for step in range(NUM_STEPS):
        loss_of(plain, step).backward()
        finish_step(plain, optimizer, record)


def policy(system: System, run: Run) -> Any:
    return system.MixedPrecisionPolicy(
        param_dtype=run.param_dtype, reduce_dtype=run.reduce_dtype
    )


def units_within_units(system: System, record: Recorder) -> None:
    run = Run(CONFIG, dist.get_world_size())
    model: Any = build(CONFIG)
    for layer in model.layers:
        system.fully_shard(layer.w1, mp_policy=policy(system, run))
        system.fully_shard(layer.wo, mp_policy=policy(system, run))
        system.fully_shard(layer, mp_policy=policy(system, run))
    system.fully_shard(model, mp_policy=policy(system, run))
    system.prepare(model)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


@dataclass
class Output:
    """Not a tuple, a list or a dict; autograd still has to be told."""

    main: torch.Tensor
    extra: torch.Tensor


class TwoHeads(nn.Module):
    """Float input that needs a gradient, two outputs of which one may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 7)
        self.main = nn.Linear(7, 3)
        self.extra = nn.Linear(7, 2)
        self.register_buffer("offset", torch.linspace(0, 1, 7))

    def forward(self, x: torch.Tensor, *, dataclass: bool = False) -> Any:
        h = torch.tanh(self.trunk(x)) + self.offset
        main, extra = self.main(h), self.extra(h)
        return Output(main, extra) if dataclass else {"main": main, "extra": [extra]}


def two_heads(system: System) -> Any:
    torch.manual_seed(0)
    model = TwoHeads()
    for child in (model.trunk, model.main, model.extra):
        system.fully_shard(child)
    system.fully_shard(model)
    system.prepare(model)
    return model


def float_input(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 6, generator=generator, requires_grad=True)


def gradient_of_the_input(system: System, record: Recorder) -> None:
    model = two_heads(system)
    for step in range(NUM_STEPS):
        x = float_input(step)
        out = model(x)
        (out["main"].sum() + out["extra"][0].pow(2).sum()).backward()
        record.add("x.grad", x.grad)
        record.add_model(model)
        model.zero_grad()


def one_output_unused(system: System, record: Recorder) -> None:
    model = two_heads(system)
    for step in range(NUM_STEPS):
        out = model(float_input(step))
        (out["main"] if step % 2 else out["extra"][0]).sum().backward()
        record.add("trunk.grad", model.trunk.weight.grad)
        model.zero_grad()


def output_in_a_dataclass(system: System, record: Recorder) -> None:
    model = two_heads(system)
    for step in range(NUM_STEPS):
        out = model(float_input(step), dataclass=True)
        (out.main.sum() + out.extra.sum()).backward()
        record.add_model(model)
        model.zero_grad()


@dataclass
class Inner:
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Outer:
    inner: Inner
    third: torch.Tensor


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Structured(nn.Module):
    """A layer of each tensor that comes in and goes out in one object."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.dtype = dtype

    def run(self, x: torch.Tensor) -> torch.Tensor:
        assert self.dtype in (None, x.dtype)
        return x + torch.tanh(self.layer(x))

    def forward(self, given: Any, *, more: Any = None) -> Any:
        if more is not None:
            given, more = more, None
        if isinstance(given, Outer):
            return Outer(self.forward(given.inner), self.run(given.third))
        return type(given)(self.run(given.left), self.run(given.right))


class Structures(nn.Module):
    def __init__(self, kind: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured(dtype) for _ in range(3))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: Any = (Pair if self.kind == "tuple" else Inner)(x, x.sin())
        if self.kind == "nested":
            given = Outer(given, x.cos())
        first, second, third = self.blocks
        given = third(second(first(given)), more=None)
        given = third(None, more=given)
        if self.kind == "nested":
            return given.inner.left + given.inner.right * given.third
        return given.left * given.right


def inputs_in_structures(system: System, record: Recorder) -> None:
    for kind in ("tuple", "dataclass", "nested"):
        if kind != "tuple" and VERSION < (2, 14):
            continue  # seen of FSDP2 from 2.14 on
        for compute, reduce in ((None, None), (BF16, BF16), (BF16, torch.float32)):
            torch.manual_seed(0)
            model: Any = Structures(kind, compute)
            for module in (*model.blocks, model):
                policy = system.MixedPrecisionPolicy(compute, reduce)
                system.fully_shard(module, mp_policy=policy)
            system.prepare(model)
            optimizer = adamw(model, foreach=False)
            for step in range(NUM_STEPS):
                x = float_input(step)
                out = model(x)
                record.add("out", out)
                out.float().square().mean().backward()
                record.add("x.grad", x.grad)
                finish_step(model, optimizer, record)


def batch_norms(system: System, record: Recorder) -> None:
    """Buffers in the dtype of computation; or norms that compute in fp32. (CPUs take no
    low weights beside buffers in fp32, without sharding either.)"""
    for two in (False, True):
        for high in (False, True):
            torch.manual_seed(0)
            layers: list[nn.Module] = [
                nn.Linear(6, 5),
                nn.BatchNorm1d(5),
                nn.Linear(5, 3),
            ]
            x = torch.randn(4, 6)
            if two:
                layers = [nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)]
                x = torch.randn(3, 1, 9, 9)
            model: Any = nn.Sequential(*layers)
            low = system.MixedPrecisionPolicy(BF16)
            own = system.MixedPrecisionPolicy(output_dtype=BF16) if high else low
            for module in (*model, model):
                policy = own if module is model[1] else low
                system.fully_shard(module, mp_policy=policy)
            system.prepare(model)
            if not high:
                for name in ("running_mean", "running_var"):
                    setattr(model[1], name, getattr(model[1], name).to(BF16))
            optimizer = adamw(model, foreach=False)
            for step in range(NUM_STEPS):
                x = x * (1 + dist.get_rank() + step) / 2
                out = model(x)
                assert out.dtype == BF16
                record.add("out", out)
                out.float().square().mean().backward()
                finish_step(model, optimizer, record)
                for name, buffer in model.named_buffers():
                    record.add(name, buffer)
            model.eval()
            record.add("eval", model(x))


def initialised_after_wrapping(system: System, record: Recorder) -> None:
    run = Run(CONFIG, dist.get_world_size())
    with torch.device("meta"):
        plain = build_on_meta()
    model = shard(plain, run, system)
    model.to_empty(device="cpu")
    values = dict(build(CONFIG).named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            rows = values[name].chunk(run.world_size)
            own = local(p)
            if own.numel():
                own.copy_(rows[dist.get_rank()])
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


def build_on_meta() -> Any:
    from support.model import Llama

    return Llama(CONFIG)


def converted_after_wrapping(system: System, record: Recorder) -> None:
    model = llama(system, param_dtype=None, reduce_dtype=None)
    model.to(torch.float64)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


def gradients_scaled_between(system: System, record: Recorder) -> None:
    """`.grad` is changed in place, replaced and removed between microbatches."""
    model = llama(system)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        loss_of(model, step, 0).backward()
        for i, p in enumerate(model.parameters()):
            if i % 3 == 0:
                p.grad.mul_(0.5)
            elif i % 3 == 1:
                p.grad = p.grad * 2
            else:
                p.grad = None
        loss_of(model, step, 1).backward()
        finish_step(model, optimizer, record)


def autocast(system: System, record: Recorder) -> None:
    model = llama(system, param_dtype=None, reduce_dtype=None)
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        finish_step(model, optimizer, record)


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        validation_between_steps,
        forward_without_backward,
        two_forwards_then_two_backwards,
        two_forwards_one_backward,
        retained_graph,
        retained_graph_summed,
        no_sync_steps_of_changing_length,
        layers_left_out,
        forwards_of_other_layers_first_in_first_out,
        sync_of_some_units,
        parameters_frozen_later,
        tied_in_the_root,
        block_called_twice,
        units_within_units,
        gradient_of_the_input,
        one_output_unused,
        output_in_a_dataclass,
        inputs_in_structures,
        batch_norms,
        initialised_after_wrapping,
        converted_after_wrapping,
        gradients_scaled_between,
        autocast,
    )
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_equals_fsdp2(pool_of, pattern, num_ranks):
    assert_pattern_equals_fsdp2(pool_of(num_ranks), __name__, pattern)
