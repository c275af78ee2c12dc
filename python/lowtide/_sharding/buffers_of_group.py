"""FSDP2's comm objects that take their buffers from the process group, or from the
memory that ranks show each other."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from lowtide._torch_version import all_gather_single, reduce_scatter_single


class GroupBuffers:
    """From the process group's allocator, where its backend has one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def allocate(
        self, size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: Any
    ) -> torch.Tensor:
        backend: Any = self.group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            return backend.allocate_tensor(
                math.prod(int(s) for s in size), dtype=dtype, device=device
            )
        return torch.empty(*size, dtype=dtype, device=device)

    def register(self, *buffers: torch.Tensor) -> None:
        """Before a collective of the group runs on ``buffers``."""


class SymmetricBuffers(GroupBuffers):
    """From torch's pool of symmetric memory, which keeps a buffer's registration with
    the group. Which buffer comes next follows from the order of calls, which all ranks
    share, and from sizes."""

    def __init__(self, group: dist.ProcessGroup, backend: Any) -> None:
        super().__init__(group)
        symmetric_memory.set_backend(backend)
        dist.barrier(group)  # registering wants a communicator, made by its first call

    def allocate(
        self, size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: Any
    ) -> torch.Tensor:
        pool: Any = symmetric_memory.get_mem_pool(device)
        with torch.get_device_module(device).use_mem_pool(pool):
            return torch.empty(size, dtype=dtype, device=device)

    def register(self, *buffers: torch.Tensor) -> None:
        for buffer in buffers:
            symmetric_memory.rendezvous(buffer, self.group.group_name)


class _OnBuffers:
    def __init__(self, buffers: GroupBuffers) -> None:
        self._buffers = buffers

    def allocate(
        self,
        size: Sequence[int | torch.SymInt],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        return self._buffers.allocate(size, dtype, device)


class BufferedAllGather(_OnBuffers, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._buffers.register(output_tensor)  # the input is a part of it
        return all_gather_single(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class BufferedReduceScatter(_OnBuffers, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._buffers.register(input_tensor, output_tensor)
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
