"""Linear layers split over the ranks of a group, between token-major shards.

``x`` [tokens / size, ..., features] on every rank -> ColumnParallelLinear ->
[tokens, ..., outputs / size] -> work on this rank's heads or columns ->
RowParallelLinear -> [tokens / size, ..., features].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide._gather.axes import Group, process_group
from lowtide.sequence_parallel.functions import (
    sp_all_gather,
    sp_gather_linear,
    sp_reduce_scatter,
)


class ColumnParallelLinear(nn.Module):
    """One or several linear layers behind one gather; each rank has some of the rows
    of each weight.

    Args:
        in_features: Features of the shard.
        out_features: Outputs of the whole layer; several, such as those of Q, K and V,
            for several layers, whose outputs come as a tuple.
        name: Of the gather; see :func:`sp_gather_linear`, likewise ``regather`` and
            ``addmm``.

    ``weights`` (and ``biases``) are parameter lists in the order of ``out_features``:
    [outputs / size, in_features] each. They are this rank's rows, started differently
    on every rank only if its random generator is.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = False,
        *,
        group: Group,
        name: str,
        regather: bool | None = None,
        addmm: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        who = f"ColumnParallelLinear '{name}'"
        self.group = process_group(group, who=who)
        self.name, self.regather, self.addmm = name, regather, addmm
        self.single = isinstance(out_features, int)
        outputs = [out_features] if isinstance(out_features, int) else out_features
        self.in_features, self.out_features = in_features, tuple(outputs)
        local = [_part(who, "out_features", n, self.group.size()) for n in outputs]
        make = {"device": device, "dtype": dtype}
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(n, in_features, **make)) for n in local
        )
        self.biases = (
            nn.ParameterList(nn.Parameter(torch.empty(n, **make)) for n in local)
            if bias
            else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.weights:
            _start(weight, self.in_features)
        for bias in self.biases or ():
            _start(bias, self.in_features)

    def forward(self, shard: Tensor) -> Any:
        outputs = sp_gather_linear(
            shard,
            list(self.weights),
            None if self.biases is None else list(self.biases),
            group=self.group,
            name=self.name,
            regather=self.regather,
            addmm=self.addmm,
        )
        return outputs[0] if self.single else outputs

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {list(self.out_features)} over "
            f"{self.group.size()} ranks, name={self.name!r}"
        )


class RowParallelLinear(nn.Module):
    """A linear layer each rank of which has some of the columns of the weight; the sum
    over the ranks comes back as token shards.

    ``weight``: [out_features, in_features / size]. ``bias``: this rank's
    [out_features / size]; it is gathered in forward, so that its gradient is complete.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        group: Group,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        who = "RowParallelLinear"
        self.group = process_group(group, who=who)
        self.in_features, self.out_features = in_features, out_features
        size, make = self.group.size(), {"device": device, "dtype": dtype}
        columns = _part(who, "in_features", in_features, size)
        self.weight = nn.Parameter(torch.empty(out_features, columns, **make))
        self.bias = None
        if bias:
            rows = _part(who, "out_features", out_features, size)
            self.bias = nn.Parameter(torch.empty(rows, **make))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _start(self.weight, self.in_features)
        if self.bias is not None:
            _start(self.bias, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        shard = sp_reduce_scatter(F.linear(x, self.weight), self.group)
        if self.bias is None:
            return shard
        return shard + sp_all_gather(self.bias, self.group, "bias", regather=False)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features} over {self.group.size()} ranks"


def _part(who: str, what: str, count: int, size: int) -> int:
    if count % size:
        raise ValueError(
            f"lowtide: {who}: expected {what} that the group's size {size} divides, "
            f"got {count}. Pad the layer, or choose another group."
        )
    return count // size


@torch.no_grad()
def _start(parameter: Tensor, fan_in: int) -> None:
    """Fills the parameter as nn.Linear does for the whole layer."""
    bound = fan_in**-0.5
    parameter.uniform_(-bound, bound)
