"""Collectives write in place though neither schema nor version says so: a region never
stores a value that one of them has changed, or will change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import ActivationPolicy, checkpoint, tag
from support.bits import same_bits

WIDTH = 8


class Reduce(torch.autograd.Function):
    """As tensor parallelism reduces, over the bytes it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class RowParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        partial = tag(self.up(x), "partial")
        return self.down(torch.sin(tag(Reduce.apply(partial * 1), "reduced")))


class WritesOverTheNamed(RowParallel):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(Reduce.apply(tag(self.up(x), "partial"))))


def gradients(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(4, WIDTH, generator=generator).requires_grad_()
    model(x * 1.5).pow(2).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def error_of(model: nn.Module) -> str:
    try:
        gradients(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def name_before_and_after() -> tuple[str, bool]:
    ours = checkpoint(RowParallel(), ActivationPolicy(save=["partial", "reduced"]))
    error = error_of(ours)
    ours.zero_grad()
    pairs = zip(gradients(RowParallel()), gradients(ours), strict=True)
    return error, all(same_bits(plain, mine) for plain, mine in pairs)


def test_what_a_collective_has_changed_is_refused(
    pool_of: Callable[[int], Any],
) -> None:
    for error, same in pool_of(2).run(name_before_and_after):
        assert "expected 'reduced' to save something" in error
        assert "1 x written to after aten.mul.Tensor made it" in error
        assert same


def name_and_write() -> str:
    return error_of(
        checkpoint(WritesOverTheNamed(), ActivationPolicy(save=["partial"]))
    )


def test_what_a_collective_will_change_raises(pool_of: Callable[[int], Any]) -> None:
    for error in pool_of(2).run(name_and_write):
        assert error == (
            "RuntimeError: lowtide: checkpoint(WritesOverTheNamed): expected 'partial' "
            "to stay as it was named, got c10d.allreduce_.default, which writes to it "
            "in place. Name the value after its last change, or write out of place."
        )


def exchange(x: Tensor, received: list[int], sent: list[int]) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    sends = torch.ops._c10d_functional_autograd.all_to_all_single
    return torch.ops._c10d_functional.wait_tensor(
        sends(x, received, sent, group.group_name)
    )


class Experts(RowParallel):
    """Rank 0 gets all the rows, rank 1 none."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [4, 4] if dist.get_rank() == 0 else [0, 0]
        routed = tag(exchange(x.sin(), rows, [4, 0]), "routed")
        return exchange(self.up(torch.sin(routed)), [4, 0], rows).sin()


def count_exchanges() -> tuple[list[int], bool]:
    ours = checkpoint(Experts(), ActivationPolicy(save=["routed"], min_bytes=100))
    counts, all_gradients = [], []
    for model in (checkpoint(Experts()), ours):
        with CallsOf("::all_to_all_single") as calls:
            all_gradients.append(gradients(model))
        counts.append(calls.count)
    return counts, all(map(same_bits, *all_gradients))


class CallsOf(TorchDispatchMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += func._schema.name.endswith(self.name)
        return func(*args, **(kwargs or {}))


def test_an_exchange_is_left_out_on_all_ranks_or_on_none(
    pool_of: Callable[[int], Any],
) -> None:
    """Though one of them has fewer bytes than a policy stores."""
    for (everything, without), same in pool_of(2).run(count_exchanges):
        assert without == everything - 1
        assert same
