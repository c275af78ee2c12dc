"""torch_remat's regions, which save what they compute inside of a checkpoint: around
sharded modules and inside of them the bits of FSDP2, around lowtide's own refused; in
lowtide's their names are those of a policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_remat
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from support.recorder import Record, Recorder, assert_trains_as_fsdp2
from support.systems import get_system

DIM, STEPS = 16, 4


class Block(nn.Module):
    def __init__(self, within: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.within = within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.within:
            return self.compute(x)
        return torch_remat.checkpoint()(self.compute)(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        attention = torch_remat.region(self.attention, "attention", recompute=False)
        y = attention(self.norm(x))
        x = torch_remat.region(torch.add, "remat_residual", recompute=True)(x, y)
        y = torch_remat.region(self.mlp, "mlp", recompute=False)(x)
        torch_remat.recompute_needs_tensor(y)
        return (x + y).sin()


class Model(nn.Module):
    def __init__(self, within: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(within) for _ in range(3))
        self.within = within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.within else torch_remat.checkpoint()(layer)(x)
        return x


def train(system_name: str, within: bool, regions: bool) -> Record:
    """A saved region is a unit of its own, which is not called again."""
    system = get_system(system_name)
    torch.manual_seed(0)
    model: Any = Model(within)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        if regions and system_name == "lowtide":
            lowtide.checkpoint(layer)
        for unit in (layer.mlp, layer):
            system.fully_shard(unit, mp_policy=policy)
    system.fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    record = Recorder()
    for step in range(STEPS):
        last = step % 2 == 1
        model.set_requires_gradient_sync(last)
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, 6, DIM, generator=generator)).square().mean()
        loss.backward()
        record.add("loss", loss)
        if last:
            record.add_model(model)
            optimizer.step()
            optimizer.zero_grad()
    return record.values


@pytest.mark.parametrize(
    ("within", "regions"),
    [(False, False), (True, False), (True, True)],
    ids=("around units", "within units", "within lowtide's regions"),
)
def test_training_equals_fsdp2(pool_of, within, regions):
    pool = pool_of(2)
    assert_trains_as_fsdp2(pool, train, within, regions)


def test_a_region_of_lowtides_within_is_refused():
    """It would take one saved tensor for the next, and gradients would be wrong."""
    block = lowtide.checkpoint(Block(within=False))
    x = torch.randn(4, 6, DIM, requires_grad=True)
    with pytest.raises(RuntimeError) as error:
        torch_remat.checkpoint()(block)(x)
    assert str(error.value).startswith(
        "lowtide: checkpoint(Block): expected no torch_remat.checkpoint around it, got "
        "one. "
    )


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.mlp = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def attention(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.linear(x).tanh(), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention = torch_remat.region(self.attention, "attention", recompute=False)
        mlp = torch_remat.region(self.mlp, "mlp", recompute=True)
        with torch_remat.name_scope("within"):
            sine = torch_remat.region(torch.sin, "sin", recompute=True)(x)
        return mlp(attention(sine)[0]).cos()


class Tanhs(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.tanh.default
        return function(*args, **(kwargs or {}))


def gradients_of(block: Any, call: Any) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 4 * DIM).view(4, DIM).requires_grad_()
    call(x).square().sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize(
    ("policy", "tanhs"),
    [
        (lowtide.ActivationPolicy(save=["attention", "within/sin"]), 1),
        (lowtide.ActivationPolicy(offload=["attention"], save=["mlp"]), 1),
        (lowtide.ActivationPolicy(save=["mlp"], recompute=["attention"]), 2),
    ],
    ids=("saved", "offloaded", "recomputed"),
)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_region_has_its_name_in_a_policy(policy, tanhs, backend):
    """A name that nothing had would raise; whether it is computed again is not what
    the region says."""
    plain, ours = Regions(), Regions()
    expected = gradients_of(plain, plain)
    lowtide.checkpoint(ours, policy)
    if backend is not None:
        if "within/sin" in policy.save or policy.offload:
            pytest.skip("scopes and the host are of regions that run eagerly")
        ours.compile(backend=backend)
    if backend is None:
        with Tanhs() as counted:
            found = gradients_of(ours, ours)
        assert counted.count == tanhs
    else:
        found = gradients_of(ours, ours)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


def test_one_model_is_checkpointed_by_either():
    plain, ours, theirs = Regions(), Regions(), Regions()
    expected = gradients_of(plain, plain)
    policy = lowtide.ActivationPolicy(save=["attention"])
    mine = gradients_of(ours, lowtide.checkpoint(ours, policy))
    other = gradients_of(theirs, torch_remat.checkpoint()(theirs))
    for a, b, c in zip(expected, mine, other, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_a_call_made_before_has_no_name():
    class Early(Regions):
        def __init__(self) -> None:
            super().__init__()
            region = torch_remat.region.__wrapped__  # as it was before lowtide's
            self.named = region(self.linear, "early", recompute=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.named(x).sin()

    lowtide.checkpoint(nn.Linear(2, 2))  # from here on regions are followed
    block = lowtide.checkpoint(Early(), lowtide.ActivationPolicy(save=["early"]))
    with pytest.raises(ValueError, match=r"torch_remat\.region made before"):
        block(torch.randn(4, DIM, requires_grad=True)).sum().backward()
