"""Sequence parallelism whose gathered activations are not kept for backward."""

from lowtide.sequence_parallel.dtensor import rematerialize_gathers
from lowtide.sequence_parallel.functions import (
    sp_all_gather,
    sp_gather_linear,
    sp_reduce_scatter,
)
from lowtide.sequence_parallel.modules import ColumnParallelLinear, RowParallelLinear
from lowtide.sequence_parallel.policy import gather_policy

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "gather_policy",
    "rematerialize_gathers",
    "sp_all_gather",
    "sp_gather_linear",
    "sp_reduce_scatter",
]
