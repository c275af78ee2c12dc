"""``CPUOffloadPolicy`` beside FSDP2's: the same bits, and what is where.

On gloo the device is the CPU. FSDP2 page-locks for an accelerator alone, so that its
policies have ``pin_memory=False``; lowtide's go the way that they go on a GPU, with
copies to leased buffers and back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lowtide
from lowtide._base.memory import ledger, offload_pool
from support.model import TINY, batch, build, loss_fn
from support.ranks import RankPool
from support.recorder import (
    Record,
    Recorder,
    assert_same_records,
    assert_trains_as_fsdp2,
    finish_step,
)
from support.systems import get_system
from support.training import adamw, local

CPU = torch.device("cpu")
NUM_STEPS = 3
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def llama(system_name: str, **settings: Any) -> Any:
    """Every block and the rest, offloaded."""
    system = get_system(system_name)
    pinned = system_name == "lowtide"
    settings = {
        "mp_policy": BF16,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned),
    } | settings
    model: Any = build(TINY)
    for module in (*model.layers, model):
        system.fully_shard(module, **settings)
    system.prepare(model)
    return model


def backward(model: Any, step: int, microbatch: int = 0) -> torch.Tensor:
    inputs, targets = batch(TINY, step, microbatch, dist.get_rank())
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return loss


# -- training -------------------------------------------------------------------------


def plain(system_name: str) -> Record:
    model = llama(system_name, mp_policy=MixedPrecisionPolicy())
    return train(model, system_name)


def mixed(system_name: str) -> Record:
    return train(llama(system_name), system_name, clip=True)


def half_storage(system_name: str) -> Record:
    """Gradients are cast before they are added to older ones."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model = llama(system_name, mp_policy=policy)
    return train(model.bfloat16(), system_name, microbatches=2)


def adding(system_name: str) -> Record:
    return train(llama(system_name), system_name, microbatches=2)


def without_sync(system_name: str) -> Record:
    model = llama(system_name, reshard_after_forward=False)
    return train(model, system_name, microbatches=3, sync=lambda k: k != 1)


def replicas(system_name: str) -> Record:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = llama(system_name, mesh=mesh)
    before = model.set_requires_all_reduce
    return train(model, system_name, microbatches=2, before=lambda k: before(k == 1))


def frozen_and_unused(system_name: str) -> Record:
    model = llama(system_name)
    model.layers[0].requires_grad_(False)
    layer = model.layers[1]
    for p in layer.parameters():
        layer.unused = p  # a name of its own, never read
        break
    return train(model, system_name)


def train_on_rows(model: nn.Module, optimizer: torch.optim.Optimizer) -> Record:
    record = Recorder()
    for step in range(NUM_STEPS):
        torch.manual_seed(step)
        model(torch.randn(4, 8)).square().sum().backward()
        finish_step(model, optimizer, record)
    return record.values


def tensor_parallel(system_name: str) -> Record:
    system = get_system(system_name)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    policy = CPUOffloadPolicy(pin_memory=system_name == "lowtide")
    system.fully_shard(model, mesh=mesh["dp"], offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return train_on_rows(model, optimizer)


def optimizer_in_backward(system_name: str) -> Record:
    """A hook finds all of its gradient on the host."""
    model = llama(system_name)
    record = Recorder()
    for name, p in model.named_parameters():

        def step(p: torch.Tensor, name: str = name) -> None:
            assert p.grad is not None
            record.add(name, p.grad)
            with torch.no_grad():
                local(p).sub_(local(p.grad), alpha=0.1)
            p.grad = None

        p.register_post_accumulate_grad_hook(step)
    for step_number in range(NUM_STEPS):
        backward(model, step_number)
        record.add_model(model)
    # In which order hooks run is each system's own.
    return sorted(record.values, key=lambda entry: entry[0])


def stepped_in_backward(system_name: str) -> Record:
    """`optimize_in_backward`, clipped, beside an optimizer behind the backward."""
    model = llama(system_name)
    optimizer: Any = adamw(model, foreach=False)
    if system_name == "lowtide":
        lowtide.optimize_in_backward(model, optimizer, max_norm=0.5)
    record = Recorder()
    for step in range(NUM_STEPS):
        record.add("loss", backward(model, step))
        if system_name != "lowtide":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        record.add_model(model)
    return record.values


def columns(system_name: str) -> Record:
    """One matrix a unit: too few to be packed, so each gets its place on arrival."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    system = get_system(system_name)
    for module in (*model, model):
        system.fully_shard(
            module,
            mp_policy=BF16,
            offload_policy=CPUOffloadPolicy(pin_memory=system_name == "lowtide"),
            shard_placement_fn=lambda p: Shard(1),
        )
    system.prepare(model)
    optimizer = adamw(model, foreach=False)
    return train_on_rows(model, optimizer)


def all_reduce_hook(system_name: str) -> Record:
    model = llama(system_name)
    for unit in (*model.layers, model):
        unit.set_all_reduce_hook(lambda row: row.mul_(0.5))
    return train(model, system_name)


def scaled(system_name: str) -> Record:
    """In fp16, with a step that overflows on one rank."""
    model = llama(system_name, mp_policy=MixedPrecisionPolicy(torch.float16))
    optimizer = adamw(model, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    record = Recorder()
    for step in range(NUM_STEPS):
        inputs, targets = batch(TINY, step, 0, dist.get_rank())
        loss = scaler.scale(loss_fn(model(inputs), targets))
        (loss * float("inf") if step == dist.get_rank() == 1 else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        record.add("scale", torch.tensor(scaler.get_scale()))
        record.add_model(model)
    return record.values


def through_state_dicts(system_name: str) -> Record:
    """A model that was on the meta device, filled by a full state dict, as verl does;
    what it has then, full and sharded."""
    record = Recorder()
    full = build(TINY).state_dict()
    with torch.device("meta"):
        model: Any = build(TINY)
    system = get_system(system_name)
    policy = CPUOffloadPolicy(pin_memory=system_name == "lowtide")
    for module in (*model.layers, model):
        system.fully_shard(module, mp_policy=BF16, offload_policy=policy)
    model.to_empty(device="cpu")
    whole = StateDictOptions(
        full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True
    )
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=whole)
    optimizer = adamw(model, foreach=False)
    for step in range(NUM_STEPS):
        backward(model, step)
        finish_step(model, optimizer, record)
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        for name, value in get_model_state_dict(model, options=options).items():
            record.add(name, value)
    states = get_optimizer_state_dict(model, optimizer)["state"]
    for name, state in sorted(states.items()):
        record.add(f"{name}.exp_avg", state["exp_avg"])
    return record.values


def train(
    model: Any,
    system_name: str,
    *,
    microbatches: int = 1,
    sync: Callable[[int], bool] = lambda k: True,
    before: Callable[[int], None] = lambda k: None,
    clip: bool = False,
) -> Record:
    optimizer = adamw(model, foreach=False)
    clips = lowtide if system_name == "lowtide" else nn.utils
    record = Recorder()
    for step in range(NUM_STEPS):
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(sync(microbatch))
            before(microbatch)
            record.add("loss", backward(model, step, microbatch))
            record.add_model(model)
        if clip:
            norm: Any = clips.clip_grad_norm_(model.parameters(), 0.5)
            record.add("norm", norm.full_tensor())
        finish_step(model, optimizer, record)
    return record.values


TRAININGS = [
    plain,
    mixed,
    half_storage,
    adding,
    without_sync,
    replicas,
    frozen_and_unused,
    tensor_parallel,
    optimizer_in_backward,
    columns,
    stepped_in_backward,
    all_reduce_hook,
    scaled,
    through_state_dicts,
]


@pytest.mark.parametrize("training", TRAININGS)
def test_training_equals_fsdp2s_offload(
    pool_of: Callable[[int], RankPool], training: Callable[[str], Record]
) -> None:
    assert_trains_as_fsdp2(pool_of(2), training)


@pytest.mark.slow
@pytest.mark.parametrize("training", [mixed, adding, without_sync])
def test_training_equals_it_on_three_ranks(
    pool_of: Callable[[int], RankPool], training: Callable[[str], Record]
) -> None:
    assert_trains_as_fsdp2(pool_of(3), training)


# -- where it is ----------------------------------------------------------------------


def where(pinned: bool) -> None:
    gc.collect()
    on_device, pool = ledger(CPU), offload_pool(CPU)
    held = pool.ledger.live()
    model = llama("lowtide", offload_policy=CPUOffloadPolicy(pin_memory=pinned))
    optimizer = adamw(model)
    registered = []
    for step in range(NUM_STEPS):
        on_device.reset_peaks()
        backward(model, step)
        assert on_device.live()["sharded_gradients"] == 0
        report = lowtide.memory_report(model)
        host = report.host
        assert host is not None
        for category in ("parameters", "sharded_gradients"):
            assert host.categories[category].live > 0
        for name, row in host.categories.items():
            assert row.live == row.planned + held.get(name, 0), (name, row, held)
        assert (host.pinned > 0) >= pinned
        assert (host.pageable > 0) >= (not pinned)
        for name in ("parameters", "sharded_gradients"):
            category = report.categories[name]
            assert category.peak <= category.planned
        assert report.categories["parameters"].peak == 0
        assert "offloaded to the host" in str(report)
        optimizer.step()
        optimizer.zero_grad()
        assert pool.ledger.live()["sharded_gradients"] == 0
        registered.append(pool.figures()["num_registrations"])
    assert registered[0] == registered[-1]


@pytest.mark.parametrize("pinned", [True, False])
def test_shards_and_gradients_are_in_the_hosts_ledger(
    pool_of: Callable[[int], RankPool], pinned: bool
) -> None:
    pool_of(2).run(where, pinned)


# -- with lowtide's own ---------------------------------------------------------------


def with_lowtides_own(offloads: bool, folder: str) -> Record:
    """A step that is undone, sleep, a checkpoint between microbatches without sync."""
    settings: dict[str, Any] = {} if offloads else {"offload_policy": None}
    model = llama("lowtide", grads="fused", **settings)
    optimizer = adamw(model, foreach=False)
    record = Recorder()

    def one(step: int, fails: bool = False) -> None:
        with lowtide.step(model, optimizer):
            backward(model, step)
            lowtide.clip_grad_norm_(model.parameters(), 0.5, skip_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
            if fails:
                raise ArithmeticError("a bad batch")

    for step in range(NUM_STEPS):
        if step == 1:
            with pytest.raises(ArithmeticError):
                one(step, fails=True)
        one(step)
        lowtide.sleep(model, optimizer)
        lowtide.wake(model, optimizer)
        record.add_model(model)
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    lowtide.save(folder, model, optimizer)
    model.set_requires_gradient_sync(True)
    for _ in range(2):
        backward(model, 1)
        finish_step(model, optimizer, record)
        lowtide.load(folder, model, optimizer)
    locals_ = torch.optim.SGD(lowtide.local_parameters(model), lr=0.1)
    backward(model, 2)
    locals_.step()
    with torch.no_grad():
        record.add("evaluated", model(batch(TINY, 0, 0, dist.get_rank())[0]))
        for p in model.parameters():  # the host's own writes, right behind a forward
            local(p).mul_(0.5)
        record.add("halved", model(batch(TINY, 0, 0, dist.get_rank())[0]))
    record.add_model(model)
    return record.values


def test_what_lowtide_has_gives_the_bits_it_has_on_the_device(
    pool_of: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool = pool_of(2)
    on_device = pool.run(with_lowtides_own, False, str(tmp_path / "device"))
    on_host = pool.run(with_lowtides_own, True, str(tmp_path / "host"))
    for mine, other in zip(on_host, on_device, strict=True):
        assert_same_records(mine, other)
