"""torch's pipeline schedules drive lowtide's stages as they drive FSDP2's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, schedules

from lowtide._torch_version import VERSION
from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system

NUM_STEPS = 3
MICROBATCHES = 4
DIM = 6


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2)
        )
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


# By name: the class, and which stages each of two ranks has.
SCHEDULES: dict[str, tuple[str, list[list[int]]]] = {
    "1f1b": ("Schedule1F1B", [[0], [1]]),
    "gpipe": ("ScheduleGPipe", [[0], [1]]),
    "interleaved": ("ScheduleInterleaved1F1B", [[0, 2], [1, 3]]),
    "breadth first": ("ScheduleLoopedBFS", [[0, 2], [1, 3]]),
    "zero bubble": ("ScheduleInterleavedZeroBubble", [[0, 2], [1, 3]]),
    "zero bubble V": ("ScheduleZBVZeroBubble", [[0, 3], [1, 2]]),
    "dual V": ("ScheduleDualPipeV", [[0, 3], [1, 2]]),
}


def make_schedule(
    system_name: str,
    name: str,
    mesh: Any,
    dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool | None = None,
    **settings: Any,
) -> tuple[Any, list[Any]]:
    """The schedule and this rank's stages, each with data-parallel ranks; two stages
    where the pipeline is one rank."""
    system = get_system(system_name)
    class_name, places = SCHEDULES[name]
    if mesh["pp"].size() == 1:
        places = [[0, 1]]
    schedule_class = getattr(schedules, class_name)
    count = sum(len(stages) for stages in places)
    torch.manual_seed(1)
    modules: list[Any] = [Stage() for _ in range(count)]
    options: dict[str, Any] = {
        "mesh": mesh["dp"],
        "reshard_after_forward": reshard_after_forward,
    }
    inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    outer = replace(inner, output_dtype=torch.float32)
    stages = []
    for index in places[mesh.get_local_rank("pp")]:
        for layer in modules[index].layers:
            system.fully_shard(layer, mp_policy=inner, **options)
        system.fully_shard(modules[index], mp_policy=outer, **options)
        stage = PipelineStage(
            modules[index],
            index,
            count,
            torch.device("cpu"),
            group=mesh.get_group("pp"),
        )
        # Gloo has no connection from a rank to itself, which a V would open.
        stage._get_init_p2p_neighbors_ops = lambda: []  # type: ignore[method-assign]
        stages.append(stage)
    several = issubclass(schedule_class, schedules.PipelineScheduleMulti)
    schedule = schedule_class(
        stages if several else stages[0],
        MICROBATCHES,
        loss_fn=lambda y, target: (y - target).pow(2).mean(),
        **settings,
    )
    return schedule, stages


def train(
    system_name: str, name: str, dtype: torch.dtype, settings: dict[str, Any]
) -> Record:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp")
    )
    # Split backwards need the parameters from forward to backward, in FSDP2, too.
    reshard = None if "f1b" in name else False
    schedule, stages = make_schedule(
        system_name, name, mesh, dtype, reshard, **settings
    )
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, foreach=False)
    record = Recorder()
    indices = [stage.stage_index for stage in stages]
    last = stages[0].num_stages - 1 in indices
    for step in range(NUM_STEPS):
        seed = 10 * step + mesh.get_local_rank("dp")
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2 * MICROBATCHES, DIM, generator=generator)
        losses: list[torch.Tensor] = []
        schedule.step(
            *([x] if 0 in indices else []),
            **({"target": x.flip(0), "losses": losses} if last else {}),
        )
        for i, loss in enumerate(losses):
            record.add(f"loss {i}", loss)
        for stage in stages:
            record.add_model(stage.submod)
        optimizer.step()
        optimizer.zero_grad()
    return record.values


def assert_trains_as_fsdp2(
    pool: Any, name: str, dtype: torch.dtype, **settings: Any
) -> None:
    theirs = pool.run(train, "fsdp2", name, dtype, settings)
    ours = pool.run(train, "lowtide", name, dtype, settings)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_records(mine, other)
        gradients = [v for name, v in mine if name.endswith(".grad")]
        assert gradients and all(gradient is not None for gradient in gradients)


def test_no_schedule_of_torch_is_missing():
    public = {
        name
        for name, one in vars(schedules).items()
        if isinstance(one, type) and issubclass(one, schedules._PipelineSchedule)
    }
    assert {name for name in public if name.startswith("Schedule")} == {
        class_name for class_name, _ in SCHEDULES.values()
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_trains_bit_equal_to_fsdp2(pool_of, name):
    assert_trains_as_fsdp2(pool_of(2), name, torch.float32)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero bubble"])
def test_schedule_with_data_parallel_ranks(pool_of, name):
    assert_trains_as_fsdp2(pool_of(4), name, torch.float32)


@pytest.mark.skipif(VERSION < (2, 15), reason="a setting of torch 2.15's schedules")
def test_a_schedule_that_waits_late_for_reductions(pool_of):
    # It asks that stages have contexts of their own.
    pool = pool_of(2)
    settings = {"defer_reduce_grad_wait": True}
    assert_trains_as_fsdp2(pool, "interleaved", torch.float32, **settings)


# Gradients that are written and those that autograd delivers are summed in other
# dtypes before and after a stage's backward is over.
@pytest.mark.parametrize("name", ["zero bubble", "dual V"])
def test_split_backward_of_bf16_stages(pool_of, name):
    assert_trains_as_fsdp2(pool_of(2), name, torch.bfloat16)


def step_behind_a_slope() -> bool:
    """Of the stages' inputs alone, as of a penalty or a saliency map."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    records = []
    for asks in (False, True):
        schedule, stages = make_schedule(
            "lowtide", "zero bubble V", mesh, reshard_after_forward=False
        )
        for stage in stages if asks else []:
            x = torch.ones(2, DIM, requires_grad=True)
            torch.autograd.grad(stage.submod(x).sum(), x)
        x = torch.ones(2 * MICROBATCHES, DIM)
        schedule.step(x, target=x)
        record = Recorder()
        for stage in stages:
            record.add_model(stage.submod)
        records.append(record.values)
    assert_same_records(*records)
    return True


def test_gradients_of_inputs_before_a_split_backward(pool_of):
    assert pool_of(1).run(step_behind_a_slope) == [True]


def error_of_resharded_stages() -> str:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    schedule, _ = make_schedule(
        "lowtide", "zero bubble V", mesh, reshard_after_forward=True
    )
    x = torch.ones(2 * MICROBATCHES, DIM)
    try:
        schedule.step(x, target=x)
    except RuntimeError as error:
        return str(error)
    return ""


def test_split_backward_without_the_parameters_raises(pool_of):
    # FSDP2 leaves the stages' gradients None.  A rank that raises takes back what it
    # was about to send, so a pipeline of more would wait for it.
    (message,) = pool_of(1).run(error_of_resharded_stages)
    assert "'norm.weight': expected its gradient from the backward of" in message
    assert message.endswith("Shard the stage with reshard_after_forward=False.")
