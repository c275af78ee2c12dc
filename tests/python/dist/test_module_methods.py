"""FSDPModule's methods and settings mean what they mean in FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from support.bits import assert_follows_rule, same_bits
from support.model import TINY, build
from support.systems import get_system
from support.training import Run, Trace, adamw, local, shard, train_step


def prefetch_forward(model: Any) -> None:
    layers = list(model.layers)
    model.set_modules_to_forward_prefetch(layers)
    layers[0].set_modules_to_forward_prefetch(layers[1:])


def prefetch_backward(model: Any) -> None:
    layers = list(model.layers)
    model.set_modules_to_backward_prefetch(layers[::-1])
    layers[-1].set_modules_to_backward_prefetch(layers[-2::-1])


def last_backward(model: Any, last: bool) -> None:
    model.set_is_last_backward(last)


def keep_unsharded_until_last(model: Any, last: bool) -> None:
    model.set_reshard_after_backward(last)
    model.set_requires_gradient_sync(last)


def unshard_ahead(model: Any, last: bool) -> None:
    handles = [layer.unshard(async_op=True) for layer in model.layers]
    if last:
        handles[0].wait()


def reshard_nothing(model: Any, last: bool) -> None:
    for layer in model.layers:
        layer.reshard()


BEFORE_TRAINING = {
    "set_modules_to_forward_prefetch": prefetch_forward,
    "set_modules_to_backward_prefetch": prefetch_backward,
}
BEFORE_MICROBATCH = {
    "set_is_last_backward": last_backward,
    "set_reshard_after_backward": keep_unsharded_until_last,
    "unshard": unshard_ahead,
    "reshard": reshard_nothing,
}


def train_calling(system: str, run: Run, method: str) -> Trace:
    model = shard(build(run.model), run, get_system(system))
    if method in BEFORE_TRAINING:
        BEFORE_TRAINING[method](model)
    optimizer = adamw(model, foreach=False)
    trace = Trace()
    for step in range(run.num_steps):
        before = BEFORE_MICROBATCH.get(method)
        train_step(model, optimizer, run, step, trace, before)
    return trace


@pytest.mark.parametrize("method", [*BEFORE_TRAINING, *BEFORE_MICROBATCH])
def test_method_keeps_the_bits(pool_of, rule, system, world_size, method):
    sync = "last" if method == "set_reshard_after_backward" else "each"
    run = Run(TINY, world_size, microbatches=3, sync=sync)
    traces = pool_of(world_size).run(train_calling, system, run, method)
    assert_follows_rule(traces, rule(run))


def unsharded_and_back(system: str, run: Run) -> list[bool]:
    """Whether layers[0].wq.weight is a full tensor with the right values while
    unsharded, a shard again afterwards, and the root's stayed a shard."""
    full = build(run.model).layers[0].wq.weight.to(run.param_dtype)
    model: Any = shard(build(run.model), run, get_system(system))
    layer = model.layers[0]
    layer.unshard()
    weight = layer.wq.weight
    facts = [not isinstance(weight, DTensor), same_bits(weight, full)]
    facts.append(isinstance(model.head.weight, DTensor))
    layer.reshard()
    facts.append(isinstance(layer.wq.weight, DTensor))
    facts.append(layer.wq.weight.shape == full.shape)
    return facts


def test_unshard_registers_full_parameters_until_reshard(pool_of, system, world_size):
    for facts in pool_of(world_size).run(
        unsharded_and_back, system, Run(TINY, world_size)
    ):
        assert facts == [True] * 5


def sync_only_the_root(system: str, run: Run) -> tuple[list[str], list[str]]:
    """Names with a gradient: after a backward without recursion, and with."""
    model: Any = shard(build(run.model), run, get_system(system))
    found = []
    for recurse in (False, True):
        model.set_requires_gradient_sync(True)
        model.set_requires_gradient_sync(False, recurse=recurse)
        run_once(model, run)
        found.append([n for n, p in model.named_parameters() if p.grad is not None])
        model.zero_grad()
    return found[0], found[1]


def run_once(model: Any, run: Run) -> None:
    from support.model import batch, loss_fn

    inputs, targets = batch(run.model, 0, 0, dist.get_rank())
    loss_fn(model(inputs), targets).backward()


def test_gradient_sync_is_set_per_module(pool_of, system):
    run = Run(TINY, 2)
    for own, recursive in pool_of(2).run(sync_only_the_root, system, run):
        layers = [n for n, _ in build(TINY).named_parameters() if "layers" in n]
        assert own == layers
        assert recursive == []


def describe_parameters(system: str, run: Run) -> dict[str, tuple[Any, ...]]:
    model = shard(build(run.model), run, get_system(system))
    facts = {}
    for name, p in model.named_parameters():
        assert isinstance(p, nn.Parameter) and isinstance(p, DTensor)
        assert p.placements == (Shard(0),)
        facts[name] = (
            tuple(p.shape),
            tuple(p.stride()),
            tuple(local(p).shape),
            p.dtype,
            p.requires_grad,
            tuple(p.device_mesh.shape),
            p.is_leaf,
        )
    return facts


def test_sharded_parameters_look_like_fsdp2s(pool_of, world_size):
    from dataclasses import replace

    run = Run(replace(TINY, frozen=("*.wk.weight",)), world_size)
    ours, theirs = (
        pool_of(world_size).run(describe_parameters, name, run)
        for name in ("lowtide", "fsdp2")
    )
    assert ours == theirs
    assert [list(facts) for facts in ours] == [list(facts) for facts in theirs]
    if world_size == 4:
        assert theirs[3]["layers.0.wk.weight"][2] == (0, 16)


def test_modules_are_torchs_fsdp_modules_by_inheritance(pool_of):
    """Pipeline schedules and frameworks ask for the class and for the state."""
    assert pool_of(1).run(inherited) == [[True, True, True, "FSDPLinear"]]


def inherited() -> list[Any]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    import lowtide

    module = lowtide.fully_shard(nn.Linear(2, 2))
    return [
        issubclass(lowtide.FSDPModule, FSDPModule),
        isinstance(module, FSDPModule) and isinstance(module, nn.Linear),
        fully_shard.state(module) is module._get_fsdp_state(),
        type(module).__name__,
    ]


def built(system: str, checkpointed: bool) -> list[Any]:
    """By the classes of sharded modules: what slicing does, and a constructor."""
    import lowtide

    fully_shard = get_system(system).fully_shard
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    for module in (model[0], model):
        fully_shard(module)
        if checkpointed:
            lowtide.checkpoint(module)
    layer, rest, first = type(model[0])(3, 2), model[1:], model[:1]
    return [
        *(type(layer), type(rest), type(first), type(type(model)(layer))),
        first[0] is model[0],
        rest[0](torch.ones(3)).shape,
        layer(torch.ones(3)).shape,
    ]


def test_classes_of_sharded_modules_build_original_modules(pool_of):
    theirs = pool_of(1).run(built, "fsdp2", False)
    assert theirs[0][:4] == [nn.Linear, nn.Sequential, nn.Sequential, nn.Sequential]
    for checkpointed in (False, True):
        assert pool_of(1).run(built, "lowtide", checkpointed) == theirs


class TwoInputs(nn.Module):
    """Float inputs by position and by keyword; says which dtypes it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 15).view(5, 3))
        self.seen: list[torch.dtype] = []

    def forward(
        self, x: torch.Tensor, *, scale: torch.Tensor, index: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        self.seen = [x.dtype, scale.dtype, index.dtype]
        return {"out": (x.to(self.weight.dtype) @ self.weight.t()) * scale}


def run_policy(system_name: str, policy: dict[str, Any]) -> list[Any]:
    system = get_system(system_name)
    module = TwoInputs()
    inner = nn.ModuleList([module])
    system.fully_shard(module, mp_policy=system.MixedPrecisionPolicy(**policy))
    rank = dist.get_rank()
    x = torch.arange(6.0).view(2, 3).div(7).add(rank).requires_grad_()
    scale = torch.tensor([1 / 3], dtype=torch.float32)
    out = inner[0](x, scale=scale, index=torch.tensor([1]))["out"]
    out.sum().backward()
    grad = module.weight.grad
    assert grad is not None and x.grad is not None
    return [module.seen, out.dtype, out.detach(), local(grad), grad.dtype, x.grad]


POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "output_fp32": {"param_dtype": torch.bfloat16, "output_dtype": torch.float32},
    "inputs_as_they_are": {
        "param_dtype": torch.bfloat16,
        "cast_forward_inputs": False,
    },
}


@pytest.mark.parametrize("policy", POLICIES)
def test_mixed_precision_policy(pool_of, policy):
    ours, theirs = (
        pool_of(2).run(run_policy, name, POLICIES[policy])
        for name in ("lowtide", "fsdp2")
    )
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            same = same_bits(a, b) if isinstance(b, torch.Tensor) else a == b
            assert same, (a, b)
