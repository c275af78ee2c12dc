"""The order in which gloo adds, and FSDP2 with exactly that order.

[Note: The left fold]
gloo's ring reduce-scatter sends owner r's columns once around the ring,
starting at the rank below it, so on every element

    sum(r) = ((x[r-1] + x[r-2]) + ...) + x[r+1]) + x[r]       ranks modulo N

each addition rounded to the reduced dtype; the average divides that sum by N.
This holds on every element when the columns a rank owns are a multiple of 128,
which is what lowtide pads to.  Otherwise segment edges of the ring may fall
inside an owner's columns, and an element or two there is added in another
order.  FSDP2 does not pad.  For N <= 2 no order exists to differ in, so stock
FSDP2 is compared; for N >= 3 FSDP2 gets `LeftFoldReduceScatter`, which is the
same sum written out, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


def fold_order(owner: int, world_size: int) -> list[int]:
    return [(owner - 1 - i) % world_size for i in range(world_size)]


def left_fold(by_rank: Sequence[torch.Tensor], owner: int) -> torch.Tensor:
    """Sum of what each rank has for `owner`, in the order of gloo's ring."""
    first, *rest = fold_order(owner, len(by_rank))
    total = by_rank[first].clone()
    for rank in rest:
        total += by_rank[rank]
    return total


class LeftFoldReduceScatter:
    """For `FSDPModule.set_custom_reduce_scatter`; input is [N, columns] flat."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert not async_op and op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM)
        world_size = group.size()
        inputs = input_tensor.new_empty(world_size * input_tensor.numel())
        dist.all_gather_into_tensor(inputs, input_tensor, group=group)
        owned = inputs.view(world_size, world_size, -1)[:, group.rank()]
        output_tensor.copy_(left_fold(owned.unbind(), group.rank()))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(world_size)


def use_left_fold(model: nn.Module) -> None:
    reducer = LeftFoldReduceScatter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Its setter refuses a module whose parameters are on several meshes.
            groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())
            for group in groups:
                group._reduce_scatter_comm = reducer
            if not groups:
                module.set_custom_reduce_scatter(reducer)
