"""FSDP2's comm objects that take their buffers from the process group."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from lowtide._torch_version import all_gather_single, reduce_scatter_single


class _GroupBuffers:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(
        self,
        size: Sequence[int | torch.SymInt],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        backend: Any = self._group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            return backend.allocate_tensor(
                math.prod(int(s) for s in size), dtype=dtype, device=device
            )
        return torch.empty(*size, dtype=dtype, device=device)


class GroupBufferAllGather(_GroupBuffers, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return all_gather_single(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class GroupBufferReduceScatter(_GroupBuffers, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
