"""What torch's other parts look for on a module that `fully_shard` has sharded: the
contract of its composable APIs, meshes of every make, settings of modules on meta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint, replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate2
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide._torch_version import VERSION
from support.recorder import Recorder, assert_pattern_equals_fsdp2, finish_step
from support.systems import System, get_system

Pattern = Callable[[System, Recorder], None]


def build() -> Any:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))


def train(model: nn.Module, record: Recorder) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x = torch.ones(2, 8) * (dist.get_rank() + 1)
    for _ in range(3):
        model(x).square().mean().backward()
        record.add(str([type(p).__name__ for p in model.parameters()]), None)
        finish_step(model, optimizer, record)


def replicate_around(system: System, record: Recorder) -> None:
    model = build()
    system.fully_shard(model[1][0])
    system.fully_shard(model[1])
    replicate(model)
    train(model, record)


def replicate_with_fsdp_around(system: System, record: Recorder) -> None:
    model = build()
    system.fully_shard(model[1])
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(),), mesh_dim_names=("replicas",)
    )
    replicate2(model, mesh=mesh)
    train(model, record)


def replicate_inside(system: System, record: Recorder) -> None:
    model = build()
    replicate(model[1])
    system.fully_shard(model)
    train(model, record)


def replicas_inside(system: System, **policy: Any) -> Any:
    """Of torch's FSDP, one within another, around nothing of ``system``'s."""
    model = build()
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("replicas",))
    policies = {"mp_policy": system.MixedPrecisionPolicy(**policy)}
    replicate2(model[1][0], mesh=mesh, **policies)
    replicate2(model[1], mesh=mesh, **policies)
    system.fully_shard(model[0], **policies)
    system.fully_shard(model, **policies)
    return model


def replicate_with_fsdp_inside(system: System, record: Recorder) -> None:
    train(replicas_inside(system), record)


def replicate_with_fsdp_inside_in_bf16(system: System, record: Recorder) -> None:
    half, single = torch.bfloat16, torch.float32
    train(replicas_inside(system, param_dtype=half, reduce_dtype=single), record)


def microbatches_of_replicas_inside(system: System, record: Recorder) -> None:
    """Settings of the root are theirs, too."""
    model = replicas_inside(system)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(2):
        for microbatch in range(3):
            if step == 0:
                model.set_requires_gradient_sync(microbatch == 2)
            else:
                model.set_requires_all_reduce(microbatch == 2)
            model.set_reshard_after_backward(microbatch == 2)
            x = torch.full((2, 8), 1.0 + dist.get_rank() + 0.1 * microbatch + step)
            model(x).square().mean().backward()
            record.add_model(model[1])  # whole replicas, but behind the last one
        finish_step(model, optimizer, record)


def finalized_replicas_inside(system: System, record: Recorder) -> None:
    model = replicas_inside(system)
    model.set_manual_backward_finalization(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(2):
        for microbatch in range(2):
            model.set_requires_gradient_sync(False)
            x = torch.full((2, 8), 1.0 + dist.get_rank() + 0.1 * microbatch + step)
            model(x).square().mean().backward()
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        finish_step(model, optimizer, record)


def ddp_around(system: System, record: Recorder) -> None:
    model = build()
    system.fully_shard(model[1])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [name for name, _ in model.named_parameters() if name.startswith("1.")]
    )
    train(DistributedDataParallel(model, broadcast_buffers=False), record)


def ddp_around_what_a_unit_ignores(system: System, record: Recorder) -> None:
    """A part inside of a unit's module is DDP's, as what is around it."""
    model = build()
    ignored = set(model[1][1].parameters())
    system.fully_shard(model[1][0])
    system.fully_shard(model[1], ignored_params=ignored)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [name for name, p in model[1].named_parameters("1") if p not in ignored]
    )
    train(DistributedDataParallel(model, broadcast_buffers=False), record)


def checkpointed(system: System, record: Recorder) -> None:
    for sharded_first in (False, True):
        model = build()
        steps = [checkpoint, system.fully_shard]
        for step in reversed(steps) if sharded_first else steps:
            step(model[1])
        system.fully_shard(model)
        train(model, record)


def flattened_meshes(system: System, record: Recorder) -> None:
    shape, names = (1, 1, dist.get_world_size()), ("replicas", "cp", "dp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    flat = mesh["cp", "dp"]._flatten("dp_cp")
    for one in (flat, mesh["replicas", "dp_cp"]):
        model = build()
        system.fully_shard(model[1], mesh=one)
        system.fully_shard(model, mesh=one)
        train(model, record)


def settings_on_meta(system: System, record: Recorder) -> None:
    with torch.device("meta"):
        model = build()
    for module in (model[0], model[1], model[2]):
        system.fully_shard(module, offload_policy=None)
    system.fully_shard(model)
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    model.to_empty(device="cpu")
    for number, p in enumerate(model.parameters()):
        nn.init.constant_(p, 0.1 * number)
    train(model, record)


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        replicate_around,
        replicate_with_fsdp_around,
        replicate_inside,
        replicate_with_fsdp_inside,
        replicate_with_fsdp_inside_in_bf16,
        microbatches_of_replicas_inside,
        *((finalized_replicas_inside,) if VERSION >= (2, 15) else ()),
        checkpointed,
        ddp_around,
        ddp_around_what_a_unit_ignores,
        flattened_meshes,
        settings_on_meta,
    )
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_composition_equals_fsdp2(pool_of, pattern):
    assert_pattern_equals_fsdp2(pool_of(2), __name__, pattern)


def states() -> list[bool]:
    model = build()
    fully_shard: Any = lowtide.fully_shard
    before = fully_shard.state(model)
    fully_shard([model[0], model[2]])
    fully_shard(model)
    state = fully_shard.state(model)
    return [
        before is None,
        state is model._get_fsdp_state(),
        fully_shard.state(model[0]) is fully_shard.state(model[2]) is not state,
        fully_shard.state(model[1]) is None,
    ]


def test_state_of_a_module(pool_of):
    assert pool_of(1).run(states) == [[True] * 4]


def replicate_what_is_sharded() -> str:
    model = build()
    lowtide.fully_shard(model)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`") as error:
        replicate(model)
    return str(error.value)


def test_a_sharded_module_is_not_replicated(pool_of):
    assert pool_of(1).run(replicate_what_is_sharded)


def settings_of_replicas() -> tuple[list[tuple[str, bool]], str]:
    """What reaches the outermost ones, and what is said of a method that torch does not
    have."""
    model = replicas_inside(get_system("lowtide"))
    names = ("set_keep_unsharded_storage", "set_reduce_scatter_unused_params")
    told: list[tuple[str, bool]] = []
    for name in names:
        method = lambda _, value, name=name: told.append((name, value))  # noqa: E731
        setattr(type(model[1]), name, method)
        getattr(model, name)(True)
        getattr(model, name)(False, recurse=False)
    with pytest.raises(NotImplementedError) as error:
        model._tell_replicas("of_another_torch", True)
    return told, str(error.value)


def test_settings_reach_replicas_that_torch_keeps_inside(pool_of):
    ((told, said),) = pool_of(1).run(settings_of_replicas)
    assert told == [
        ("set_keep_unsharded_storage", True),
        ("set_reduce_scatter_unused_params", True),
    ]
    assert said.startswith(
        "lowtide: FSDPModule.of_another_torch: expected no ReplicateSequential inside, "
        "got one, whose of_another_torch torch "
    )


def shard_what_is_replicated() -> str:
    model = build()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("replicas",))
    replicate2(model[1], mesh=mesh)
    with pytest.raises(ValueError, match="does not manage") as error:
        lowtide.fully_shard(model[1])
    return str(error.value)


def test_a_replicated_module_is_not_sharded(pool_of):
    (said,) = pool_of(1).run(shard_what_is_replicated)
    assert said == (
        "lowtide: fully_shard: expected a module that torch's replicate does not "
        "manage, got ReplicateSequential. Shard what is around it, or parts of the "
        "model beside it."
    )


def prefetch_on_meta() -> list[str]:
    """What the first unit's forward has gathered when its module runs."""
    with torch.device("meta"):
        model = build()
    for module in model:
        lowtide.fully_shard(module)
    lowtide.fully_shard(model)
    model[0].set_modules_to_forward_prefetch([model[2]])
    model.to_empty(device="cpu")
    units = [module._get_fsdp_state() for module in model]
    seen: list[str] = []
    model[0].register_forward_hook(
        lambda *_: seen.extend(state.unit.state for state in units)
    )
    model(torch.ones(2, 8))
    return seen


def test_prefetch_lists_set_on_meta_are_followed(pool_of):
    assert pool_of(1).run(prefetch_on_meta) == [["sharded", "sharded", "gathering"]]
