"""A head that lowtide shards: its rows come from all ranks, block by block, or the
whole head for one call."""

from collections.abc import Callable, Generator
from typing import TypeVar

import torch
from torch import Tensor, nn

from lowtide import _C
from lowtide._base.classes import class_name
from lowtide._base.rows import RowChunk, strided_chunks
from lowtide._sharding.unit import UnitState, unit_state
from lowtide.losses._rows import accumulate_dtype

_Loss = TypeVar("_Loss", Tensor, tuple[Tensor, Tensor, Tensor])


def stream_rows(head: nn.Linear) -> None:
    """Never gather ``head``, a unit of its own without bias, as a whole ahead of its
    loss. ``linear_cross_entropy`` does this by itself when it first meets the head;
    called before the first step it also keeps that step from prefetching it.

    Raises ValueError for a module that is no such unit.
    """
    state = unit_state(head)
    if state is None or not can_stream(state):
        raise ValueError(
            "lowtide: stream_rows: expected a linear layer without bias that is a unit "
            f"of its own, got {class_name(head)}. Call fully_shard(head) first."
        )
    state.materialized().stream_rows()


def can_stream(state: UnitState) -> bool:
    """Rows are streamed for a unit, alone in its call, with one weight and no more."""
    alone = len(state.together) == len(state.parameters) == 1
    return alone and state.parameters[0].may_stream_rows


class ShardedRows:
    """``VocabularyRows`` over the blocks of a unit's :class:`_C.RowStream`.

    ``recorded``: autograd records the forward that reads them.
    """

    def __init__(self, state: UnitState, recorded: bool) -> None:
        self._stream: _C.RowStream = state.materialized().stream_rows()
        self._recorded = recorded
        parameter = state.parameters[0]
        self.compute_dtype = state.dtypes(parameter).compute
        self.vocab_size, self.features = parameter.shard.shape
        self.chunks = strided_chunks(
            self.vocab_size, self._stream.world_size, self._stream.block_rows
        )
        self._device = state.device

    def read(self, *, backward: bool) -> Generator[Tensor, None, None]:
        if backward:
            self._stream.begin_backward()
        else:
            self._stream.begin_forward(self._recorded)
        try:
            for block in range(len(self.chunks)):
                yield self._stream.fetch(block)
        finally:
            self._stream.end()

    def gradient_buffer(self, chunk: RowChunk) -> Tensor:
        # A new one each time: the last one is on its way to the reduce-scatter.
        return torch.empty(
            (chunk.num_rows, self.features),
            dtype=accumulate_dtype(self.compute_dtype),
            device=self._device,
        )

    def put_gradient(self, chunk: RowChunk, gradient: Tensor) -> None:
        self._stream.put(chunk.start // self._stream.block_rows, gradient)

    def take_gradient(self) -> None:
        """The gradient left block by block; the unit sets the shard's ``.grad``."""


def gathered_whole(
    state: UnitState, head: nn.Module, hidden: Tensor, loss: Callable[[Tensor], _Loss]
) -> _Loss:
    """``loss(hidden)`` as if it were the forward of ``head``: gathered before it,
    freed after it, its gradient reduced once. A unit that casts what its modules
    return to fewer bits does not cast the loss."""
    args, _ = state._pre_forward(head, (hidden,), {})
    output = loss(args[0])
    cast_to = state.policy.output_dtype
    first = output if isinstance(output, Tensor) else output[0]
    widens = cast_to is not None and cast_to.itemsize >= first.itemsize
    changed: _Loss = state._post_forward(head, args, output, casts_output=widens)
    return changed
