"""Modules sharded together, `fully_shard([a, b])`, of which only some run, some run
again, some raise or are computed again: the bits of FSDP2, and nothing that one step
leaves to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.recorder import (
    Recorder,
    assert_pattern_equals_fsdp2,
    assert_same_records,
    finish_step,
)
from support.systems import System, get_system

NUM_STEPS = 3
Pattern = Callable[[System, Recorder], None]


class Model(nn.Module):
    """A norm and a head that are one unit, behind blocks that are units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 7)
        self.with_head = True
        self.by_weight = False
        self.raises = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.raises == "between":
            raise ValueError("between the modules")
        if self.by_weight:
            return nn.functional.linear(x, self.head.weight, self.head.bias)
        return self.head(x) if self.with_head else x


def raise_inside(*_: Any) -> None:
    raise ValueError("inside the head")


def build(system: System, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        system.fully_shard(block, **settings)
    system.fully_shard([model.norm, model.head], **settings)
    system.fully_shard(model, **settings)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rows(step: int, count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(count, 8, generator=generator)


def loss_of(model: Any, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(rows(step)).square().mean()
    return loss


def all_run(system: System, record: Recorder) -> None:
    for reshard in (None, True, False):
        model = build(system, reshard_after_forward=reshard)
        optimizer = optimizer_of(model)
        for step in range(NUM_STEPS):
            loss_of(model, step).backward()
            finish_step(model, optimizer, record)


def each_named_to_prefetch(system: System, record: Recorder) -> None:
    """Both modules of the list, which are one unit, as prime-rl does."""
    model = build(system)
    first, last = model.blocks
    model.set_modules_to_forward_prefetch([first])
    first.set_modules_to_forward_prefetch([last])
    last.set_modules_to_forward_prefetch([model.norm, model.head])
    model.head.set_modules_to_backward_prefetch([last])
    last.set_modules_to_backward_prefetch([first])
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


def only_the_first_runs(system: System, record: Recorder) -> None:
    model = build(system)
    optimizer = optimizer_of(model)
    for step in range(2 * NUM_STEPS):
        model.with_head = step % 2 == 1
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


def only_the_first_runs_without_gradients(system: System, record: Recorder) -> None:
    model = build(system)
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        model.with_head = False
        with torch.no_grad():
            record.add("norm", model(rows(50)))
            record.add("norm", model(rows(51)))
        model.with_head = True
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


def weight_of_a_module_that_does_not_run(system: System, record: Recorder) -> None:
    """As fused losses take it: what autograd saves of it is read before anything of
    the norm's backward."""
    for reshard in (None, True, False):
        model = build(system, reshard_after_forward=reshard)
        model.by_weight = True
        optimizer = optimizer_of(model)
        for step in range(NUM_STEPS):
            loss_of(model, step).backward()
            finish_step(model, optimizer, record)


def head_by_chunks(system: System, record: Recorder) -> None:
    """The loop of torchtitan's chunked loss: the head runs outside of the model's
    forward, a backward for each chunk, and one reduction behind them."""
    for sync in (False, True):
        model = build(system, reshard_after_forward=False)
        model.with_head = False
        optimizer = optimizer_of(model)
        for step in range(NUM_STEPS):
            hidden = model(rows(step))
            leaf = hidden.detach().requires_grad_()
            model.head.set_reshard_after_forward(False, recurse=False)
            model.head.set_reshard_after_backward(False, recurse=False)
            model.head.set_requires_gradient_sync(sync, recurse=False)
            model.head.unshard()
            for chunk in leaf.chunk(2):
                loss = model.head(chunk).square().mean()
                loss.backward()
                record.add("loss", loss.detach())
            model.head.set_requires_gradient_sync(True, recurse=False)
            model.head.set_reshard_after_backward(True, recurse=False)
            assert leaf.grad is not None
            hidden.backward(leaf.grad)
            finish_step(model, optimizer, record)


def checkpointed(system: System, record: Recorder) -> None:
    """Each module of the group in a region of its own, whose recomputation stops
    early: before the module has returned."""
    for reshard in (True, False):
        model = build(system, reshard_after_forward=reshard)
        for module in (model.norm, model.head):
            forward = module.forward

            def again(x: torch.Tensor, forward: Any = forward) -> Any:
                return checkpoint(forward, x, use_reentrant=False)

            module.forward = again
        optimizer = optimizer_of(model)
        for step in range(NUM_STEPS):
            loss_of(model, step).backward()
            finish_step(model, optimizer, record)


class Regions(Model):
    """Hooks of the modules run in the recomputation, too."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (*self.blocks, self.norm, self.head):
            x = checkpoint(module, x, use_reentrant=self.reentrant)
        return x


def train_regions(system: System, record: Recorder, *, reentrant: bool) -> None:
    model = build(system)
    model.__class__ = type("Model", (type(model), Regions), {})
    model.__class__.forward = Regions.forward
    model.reentrant = reentrant
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        model(rows(step).requires_grad_()).square().mean().backward()
        finish_step(model, optimizer, record)


def checkpointed_from_outside(system: System, record: Recorder) -> None:
    train_regions(system, record, reentrant=False)


def parallel_modules(system: System, record: Recorder) -> None:
    """Several modules read the same input, in another order each time."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
            self.out = nn.Linear(8, 8)
            self.order = "qkv"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            of = {name: getattr(self, name)(x) for name in self.order}
            y: torch.Tensor = self.out((of["q"] * of["k"]).tanh() * of["v"])
            return y

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 8))
    attention: Any = model[1]
    system.fully_shard([attention.q, attention.k, attention.v])
    system.fully_shard([model[0], model[2]])
    system.fully_shard(model)
    optimizer = optimizer_of(model)
    for order in ("qkv", "vqk", "kvq"):
        attention.order = order
        model(rows(0)).square().mean().backward()
        finish_step(model, optimizer, record)


def mixed_precision(system: System, record: Recorder) -> None:
    """Whose inputs and outputs are cast: torch 2.13 has changed it."""
    policy = system.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
    )
    model = build(system, mp_policy=policy)
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        dtypes: list[torch.dtype] = []
        watch = model.norm.register_forward_hook(
            lambda _, args, out, to=dtypes: to.extend((args[0].dtype, out.dtype))
        )
        loss = loss_of(model, step)
        watch.remove()
        record.add(f"{dtypes} {loss.dtype}", loss.detach())
        loss.backward()
        finish_step(model, optimizer, record)


def nested_in_the_list(system: System, record: Recorder) -> None:
    """A module that another of the list contains belongs to that one."""
    torch.manual_seed(0)
    model = Model()
    system.fully_shard([model.blocks[0], model.blocks[0][0], model.norm])
    system.fully_shard(model)
    record.add(type(model.blocks[0][0]).__name__, None)
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        all_run,
        each_named_to_prefetch,
        only_the_first_runs,
        only_the_first_runs_without_gradients,
        weight_of_a_module_that_does_not_run,
        head_by_chunks,
        checkpointed,
        checkpointed_from_outside,
        parallel_modules,
        mixed_precision,
        nested_in_the_list,
    )
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_group_equals_fsdp2(pool_of, pattern):
    assert_pattern_equals_fsdp2(pool_of(2), __name__, pattern)


# -- what FSDP2 2.11 does not run: beside modules that are units of their own ---------


class Apart:
    """A system that makes a unit of every module in a list."""

    def __init__(self, system: System) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    def fully_shard(self, module: Any, **settings: Any) -> None:
        for one in module if isinstance(module, list) else [module]:
            self._system.fully_shard(one, **settings)


def head_by_chunks_that_reshards(system: System, record: Recorder) -> None:
    """Chunks of a head that is freed after each; the last step runs the whole."""
    model = build(system)
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        model.with_head = step == NUM_STEPS - 1
        if not model.with_head:
            hidden = model(rows(step))
            leaf = hidden.detach().requires_grad_()
            for chunk in leaf.chunk(2):
                loss = model.head(chunk).square().mean()
                loss.backward()
                record.add("loss", loss.detach())
            hidden.backward(leaf.grad)
        else:
            loss_of(model, step).backward()
        finish_step(model, optimizer, record)


def head_again_in_the_forward(system: System, record: Recorder) -> None:
    """The head runs for every chunk inside the model's forward."""
    model = build(system)

    def by_chunks(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x)
        return torch.cat([model.head(chunk) for chunk in model.norm(x).chunk(3)])

    model.forward = by_chunks
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


def reentrant_regions(system: System, record: Recorder) -> None:
    train_regions(system, record, reentrant=True)


def raises_in_forward(system: System, record: Recorder) -> None:
    """Between the modules, inside one of them, in the model or alone."""
    model = build(system)
    optimizer = optimizer_of(model)
    for step, how in enumerate(("between", "inside", "alone", "caught")):
        bomb = (
            model.head.register_forward_pre_hook(raise_inside)
            if how != "between"
            else None
        )
        model.raises = how
        if how == "caught":
            model.with_head = False
            hidden = model(rows(step))
            with pytest.raises(ValueError, match="the (modules|head)"):
                model.head(hidden)
            del hidden
            model.with_head = True
        else:
            with pytest.raises(ValueError, match="the (modules|head)"):
                model.head(rows(step)) if how == "alone" else loss_of(model, step)
        if bomb is not None:
            bomb.remove()
        model.raises = ""
        optimizer.zero_grad()
        loss_of(model, step).backward()
        finish_step(model, optimizer, record)


BESIDE_APART: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        head_by_chunks_that_reshards,
        head_again_in_the_forward,
        reentrant_regions,
        raises_in_forward,
    )
}


def record_beside(name: str) -> tuple[Any, Any]:
    lowtide_system = get_system("lowtide")
    together, apart = Recorder(), Recorder()
    BESIDE_APART[name](lowtide_system, together)
    BESIDE_APART[name](Apart(lowtide_system), apart)  # type: ignore[arg-type]
    return together.values, apart.values


@pytest.mark.parametrize("pattern", BESIDE_APART)
def test_group_equals_units_apart(pool_of, pattern):
    for together, apart in pool_of(2).run(record_beside, pattern):
        assert_same_records(together, apart)


def states_at_rest() -> list[str]:
    """After a forward of a part and its backward, after forwards of parts alone and
    without gradients."""
    model = build(get_system("lowtide"))
    model.with_head = False
    seen = []
    x = model(rows(0))
    seen.append(type(model.norm.weight.data).__name__)
    x.sum().backward()
    seen.append(type(model.norm.weight.data).__name__)
    model.head(x.detach())
    seen.append(type(model.head.weight.data).__name__)
    with torch.no_grad():
        model.head(model(rows(0)))
    seen.append(type(model.norm.weight.data).__name__)
    return seen


def test_a_part_is_freed_by_its_backward_or_when_its_forward_returns(pool_of):
    for seen in pool_of(1).run(states_at_rest):
        assert seen == ["Tensor", *["DTensor"] * 3]
