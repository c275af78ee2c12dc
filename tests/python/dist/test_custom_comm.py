"""The user's own collectives: they run, and the bits stay those of FSDP2 with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from support.left_fold import LeftFoldReduceScatter
from support.model import ModelConfig, batch, build, loss_fn
from support.recorder import Record, Recorder, assert_same_records, finish_step
from support.systems import get_system
from support.training import adamw

CONFIG = ModelConfig(
    dim=16, num_heads=2, num_kv_heads=2, kv_dim=8, ffn=24, vocab=37, num_layers=2
)
NUM_STEPS = 3


class Recording:
    """FSDP2's comm objects, through the default group's own collectives."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.dtype, int]] = []
        self.allocated = 0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)


class RecordingAllGather(Recording):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self.calls.append(("gather", input_tensor.dtype, input_tensor.numel()))
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class RecordingReduceScatter(LeftFoldReduceScatter):
    """Adds in one order, whatever the number of ranks and the sizes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.dtype, int]] = []

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.calls.append((str(op), input_tensor.dtype, input_tensor.numel()))
        super().__call__(output_tensor, input_tensor, group, op, async_op)


def train_with_custom_comm(system_name: str, sync: bool) -> tuple[Record, list[Any]]:
    gather, reduce = RecordingAllGather(), RecordingReduceScatter()
    system = get_system(system_name)
    model: Any = build(CONFIG)
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in (*model.layers, model):
        system.fully_shard(unit, mp_policy=policy)
    system.prepare(model)
    for layer in model.layers:
        layer.set_custom_all_gather(gather)
        layer.set_custom_reduce_scatter(reduce)
    optimizer = adamw(model, foreach=False)
    record = Recorder()
    for step in range(NUM_STEPS):
        for last in (False, True):
            model.set_requires_gradient_sync(sync or last)
            inputs, targets = batch(CONFIG, step, int(last), dist.get_rank())
            loss_fn(model(inputs), targets).backward()
        finish_step(model, optimizer, record)
    return record.values, [gather.calls, reduce.calls, gather.allocated > 0]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("sync", [True, False], ids=("chunks", "slabs"))
def test_custom_comm_objects_run_and_keep_the_bits(pool_of, sync, num_ranks):
    pool = pool_of(num_ranks)
    theirs = pool.run(train_with_custom_comm, "fsdp2", sync)
    ours = pool.run(train_with_custom_comm, "lowtide", sync)
    for (mine, did), (other, they_did) in zip(ours, theirs, strict=True):
        assert_same_records(mine, other)
        gathers, reduces, allocated = did
        assert allocated
        # Two layers, forward and backward of two microbatches a step.
        assert len(gathers) == 2 * 2 * 2 * NUM_STEPS
        assert all(dtype == torch.uint8 for _, dtype, _ in gathers)
        assert len(reduces) >= 2 * NUM_STEPS * (2 if sync else 1)
        operations = {(op, dtype) for op, dtype, _ in reduces}
        if num_ranks == 1:  # FSDP2 reduces nothing on one rank
            assert they_did[1] == []
            assert operations == {("RedOpType.SUM", torch.float32)}
        else:
            assert operations == {(op, dtype) for op, dtype, _ in they_did[1]}


def refuse_own_buffers_beside_custom_comm() -> str:
    from lowtide import fully_shard

    module: Any = fully_shard(nn.Linear(2, 2))
    module.set_custom_all_gather(RecordingAllGather())
    try:
        module.set_allocate_memory_from_process_group_for_comm(True)
    except AssertionError as error:
        return str(error)
    return "no error"


def test_own_buffers_beside_a_custom_object_are_refused(pool_of):
    for message in pool_of(2).run(refuse_own_buffers_beside_custom_comm):
        assert message == (
            "lowtide: FSDPModule.set_allocate_memory_from_process_group_for_comm: "
            "expected no custom comm object, got RecordingAllGather. It allocates its "
            "own buffers: remove one of the two calls."
        )


def ask_cpus_for_symmetric_memory() -> None:
    from lowtide import fully_shard

    module: Any = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="set_symm_mem_for_comm: .* a mesh of CPUs"):
        module.set_symm_mem_for_comm()


def test_symmetric_memory_is_the_accelerators(pool_of):
    pool_of(2).run(ask_cpus_for_symmetric_memory)


MESSAGE = "no route to rank 3"


class LostWork:
    def wait(self) -> None:
        raise ConnectionError(MESSAGE)


class FailingAllGather(RecordingAllGather):
    fails = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails == "all-gather":
            raise ConnectionError(MESSAGE)
        if self.fails == "its wait":
            return LostWork()
        return super().__call__(*args, **kwargs)


class FailingReduceScatter(RecordingReduceScatter):
    fails = ""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self.fails == "reduce-scatter":
            raise ConnectionError(MESSAGE)
        super().__call__(*args, **kwargs)


def error_of_a_comm_object(what: str) -> tuple[str, bool]:
    """What is raised, and whether training goes on."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard = get_system("lowtide").fully_shard
    for module in (*model, model):
        fully_shard(module)
    gather, reduce = FailingAllGather(), FailingReduceScatter()
    model[1].set_custom_all_gather(gather)
    model[1].set_custom_reduce_scatter(reduce)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    model.zero_grad()
    gather.fails = reduce.fails = what
    with pytest.raises((ConnectionError, RuntimeError)) as error:
        model(x).sum().backward()
    gather.fails = reduce.fails = ""
    lowtide.abort_step(model)
    model(x).sum().backward()
    goes_on = all(p.grad is not None for p in model.parameters())
    return f"{type(error.value).__name__}: {error.value}", goes_on


@pytest.mark.parametrize("what", ["all-gather", "its wait", "reduce-scatter"])
def test_the_error_of_a_comm_object_is_not_lost(pool_of, what):
    for text, goes_on in pool_of(2).run(error_of_a_comm_object, what):
        assert text == f"ConnectionError: {MESSAGE}"
        assert goes_on
