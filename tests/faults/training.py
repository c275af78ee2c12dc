"""A training whose every part can be made to fail in a step, with lowtide or FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from support.breaking import BreaksAt
from support.saving import shards
from support.systems import get_system

STEPS, FAILING = 4, 1
DIM = 8


class Inner(nn.Module):
    """Checkpointed: the second forward of a step is the recomputation."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM)
        object.__setattr__(self, "training_", training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.training_.reached("recomputation" if self.training_.backward else "inner")
        return x + self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.2))


class Compiled(nn.Module):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        object.__setattr__(self, "training_", training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.linear(x))
        self.training_.reached("compiled block")
        return x * 2


class Net(nn.Module):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.inner, self.compiled = Inner(training), Compiled(training)
        object.__setattr__(self, "training_", training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.training_.reached("forward")
        x = _Fuse.apply(self.first(x), self.training_, "backward")
        x.register_hook(lambda gradient: self.training_.reached("gradient hook"))
        if self.training_.variant == "offload":
            x = self.inner(self.inner(x * 1.0))  # the first input leaves
        else:
            x = checkpoint(self.inner, x, use_reentrant=False)
        return self.last(self.compiled(x))


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, training: Training, place: str) -> Any:
        ctx.training, ctx.place = training, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.training.reached(ctx.place)
        return gradient, None, None


class _Comm:
    """The group's own collectives, at which something may happen first."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.training.reached("all-gather")
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class _ReduceScatter(_Comm):
    def __call__(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.training.reached("reduce-scatter")
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


class Training:
    """``at[place]`` is called once where the place is reached. Variants: a block is
    "compiled", or the checkpoint lowtide's, whose input is on the host ("offload"), or
    all collectives are the system's own ("own collectives")."""

    def __init__(self, system: str, variant: str = "") -> None:
        self.variant = variant
        self.at: dict[str, Callable[[], Any]] = {}
        self.backward = False
        self.change_batch: Callable[[Any, Any], Any] | None = None
        self.clip_as_error = False
        self.in_optimizer: Any = contextlib.nullcontext()
        self.system = system
        torch.manual_seed(0)
        self.model: Any = Net(self)
        self.model.compiled.register_forward_pre_hook(
            lambda *_: self.reached("forward pre-hook")
        )
        self.model.compiled.register_forward_hook(
            lambda *_: self.reached("forward hook")
        )
        if variant == "compiled":
            self.model.compiled.compile(backend="aot_eager")
        elif variant == "offload":
            policy = lowtide.ActivationPolicy(offload=["input"], prefetch=0)
            lowtide.checkpoint(self.model.inner, policy)
        fully_shard = get_system(system).fully_shard
        model = self.model
        for unit in (model.first, model.inner, model.compiled, model.last, model):
            fully_shard(unit)
        if variant != "own collectives":
            model.inner.set_custom_all_gather(_AllGather(self))
            model.inner.set_custom_reduce_scatter(_ReduceScatter(self))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
        self.optimizer.register_step_pre_hook(
            lambda *_: self.reached("optimizer's hook")
        )
        torch.manual_seed(1 + dist.get_rank())

    @torch.compiler.disable
    def reached(self, place: str) -> None:
        if (act := self.at.pop(place, None)) is not None:
            act()

    def batches(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.reached("data loader")
        seed = 100 * number + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, DIM, generator=generator)
        yield x, torch.randint(0, 3, (5,), generator=generator)

    def step(self, number: int) -> None:
        (batch,) = self.batches(number)
        if self.change_batch is not None:
            change, self.change_batch = self.change_batch, None
            batch = change(*batch)
        self.backward = False
        out = self.model(batch[0])
        self.reached("loss")
        loss = nn.functional.cross_entropy(out, batch[1])
        self.backward = True
        loss.backward()
        as_error, self.clip_as_error = self.clip_as_error, False
        nn.utils.clip_grad_norm_(
            self.model.parameters(), 1.0, error_if_nonfinite=as_error
        )
        breaking, self.in_optimizer = self.in_optimizer, contextlib.nullcontext()
        with breaking:
            self.optimizer.step()
        self.reached("behind the optimizer")
        self.optimizer.zero_grad()

    def break_optimizer(self, how: Callable[[], None], at: int = 7) -> None:
        self.in_optimizer = BreaksAt(at, how)

    def state(self) -> dict[str, torch.Tensor | None]:
        return shards(self.model, self.optimizer)
