"""Several devices of one process, memory that processes share, and symmetric memory of
ranks: what torch does with CUDA's and NCCL's calls for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from lowtide.phantom.dry import driver, launch
from support import dry_programs
from support.dry_process import call_dry

MIB = 1 << 20
WIDTH = 1024


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor([3.0]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.tensor([self.scale.item()], device=x.device)
        return self.layer(x) * self.scale, scale


def several_devices() -> dict[str, Any]:
    made = torch.tensor([1, 2, 3], device="cuda:0")
    return {
        "peers": torch.cuda.can_device_access_peer(0, 1),
        "copied": made.to("cuda:1").tolist(),
        "part": on_a_part_of_the_other(),
        "shared": shared_with_another_process(),
        **data_parallel(),
    }


def data_parallel() -> dict[str, Any]:
    model = Scaled().cuda()
    replicated = nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = torch.cuda.memory_allocated(1)
    for _ in range(2):
        out, scales = replicated(torch.randn(512, WIDTH, device="cuda"))
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "out": (tuple(out.shape), str(out.device)),
        "scales": scales.tolist(),
        "other": torch.cuda.max_memory_allocated(1) - before,
        "kinds": {call.kind for call in driver.calls()},
    }


def on_a_part_of_the_other() -> tuple[int, int, bool]:
    """Memory of the product there, the device of its stream, and whether more than the
    GPU has is refused."""
    with torch.cuda.device(1):
        before = torch.cuda.memory_allocated(1)
        part = torch.cuda.green_contexts.GreenContext.create(num_sms=20, device_id=1)
        part.set_context()
        x = torch.randn(WIDTH, WIDTH, device="cuda")
        product = x @ x
        part.pop_context()
        found = torch.cuda.memory_allocated(1) - before
    try:
        torch.cuda.green_contexts.GreenContext.create(num_sms=133, device_id=0)
    except RuntimeError:
        return found, product.get_device(), True
    return found, product.get_device(), False


def shared_with_another_process() -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=dry_programs.look_at_shared, args=(there,))
    process.start()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    here.send(held)
    assert here.poll(200)
    found: dict[str, Any] = here.recv()
    process.join()
    return found


def symmetric() -> dict[str, Any]:
    """Products with what all ranks have, in symmetric memory."""
    dist.init_process_group("nccl")
    group = dist.group.WORLD.group_name
    before = driver.peak_memory(0)
    held = symmetric_memory.empty(16 * MIB, dtype=torch.bfloat16, device="cuda")
    handle = symmetric_memory.rendezvous(held, group)
    in_use = driver.peak_memory(0) - before
    x, weight = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    (gathered, (product,)) = torch.ops.symm_mem.fused_all_gather_matmul(
        x, [weight], 0, group
    )
    scattered = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x, weight, "sum", 0, group
    )
    handle.barrier()
    return {
        "ranks": (handle.rank, handle.world_size),
        "in use": in_use,
        "of a peer": tuple(handle.get_buffer(1, (4, 4), torch.bfloat16).shape),
        "gathered": (tuple(gathered.shape), tuple(product.shape)),
        "scattered": tuple(scattered.shape),
        "switch": tuple(
            torch.ops.symm_mem.multimem_all_reduce_(held, "sum", group).shape
        ),
    }


def test_data_parallel_and_memory_of_others():
    without = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
    found = call_dry(
        several_devices, machine=launch.Machine(devices=2), environment=without
    )
    assert found["peers"] is True
    assert found["copied"] == [1, 2, 3]
    assert found["part"] == (2 * 4 * WIDTH * WIDTH, 1, True)
    # The other process has the tensor, and not its bytes once more.
    assert found["shared"]["shape"] == (64 * MIB,)
    assert found["shared"]["device"] == "cuda:0"
    assert found["shared"]["in use"] < 64 * MIB
    # Each device has its half of the rows, and what the host made.
    assert found["out"] == ((512, WIDTH), "cuda:0")
    assert found["scales"] == [3.0, 3.0]
    # A replica and its gradients, when values between the layers are gone again.
    weights, values = 4 * WIDTH * (WIDTH + 1), 256 * WIDTH * 4
    assert 2 * weights <= found["other"] < 2 * weights + 3 * values
    assert {"init", "broadcast", "reduce"} <= found["kinds"]


def test_symmetric_memory():
    for world, rank in ((8, 0), (16, 11)):
        machine = launch.Machine(world=world, rank=rank)
        found = call_dry(symmetric, machine=machine)
        assert found["ranks"] == (rank, world)
        # The buffer and its signals, in whole steps of memory, of this rank alone.
        assert 32 * MIB < found["in use"] <= 36 * MIB
        assert found["of a peer"] == (4, 4)
        assert found["gathered"] == ((64 * world, 64), (64 * world, 64))
        assert found["scattered"] == (64 // world, 64)
        assert found["switch"] == (16 * MIB,)
