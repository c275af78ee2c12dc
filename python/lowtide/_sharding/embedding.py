"""A large embedding, block by block of rows: neither its table nor the table's
gradient is ever there as a whole.

Both are 1 GB for 128 K rows of 4096 in bf16, though a step touches few of the rows. A
unit whose module is one large ``nn.Embedding`` is not gathered: forward reads one block
of every rank's rows after the other and keeps those that were asked for; backward
computes the gradient of one block after the other, each as large as a chunk of the
gradient ring. Both give the same numbers as autograd's on the whole table.

A class that derives from ``nn.Embedding`` may do more in its forward, scale what it
looked up or mask it. If it does nothing with the table but look up, which is tried on
tensors without bytes before the first forward, its lookup is done in blocks.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lowtide import _C
from lowtide._base.backward import PerBackward, in_backward
from lowtide._base.classes import class_name
from lowtide._base.rows import RowChunk, strided_chunks

# A table of that many bytes in fp32 or more is read, and its gradient comes, in blocks.
# Below, the kernels that a block takes cost more than the bytes are worth.
LARGE_TABLE = 256 << 20
# Bytes of a block that forward reads, two of which live at once. It costs a pass over
# the output and a collective, which is long enough to be limited by bandwidth. Its
# latency grows with the number of ranks: among that many it is half the table, if that
# is no more than the most. The hole that two of them leave is one for a head of the
# table's shape.
LOOKUP_BYTES = 128 << 20
LOOKUP_RANKS = 64
MOST_LOOKUP_BYTES = 1 << 30


def wants_rows(module: nn.Module, original: type) -> bool:
    """Whether the unit of ``module``, an ``original``, works in blocks of rows."""
    return (
        isinstance(module, nn.Embedding)
        and module.weight.numel() * 4 >= LARGE_TABLE
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
        and only_looks_up(module, original)
    )


def lookup_rows(shard_rows: int, ranks: int, row_bytes: int) -> int:
    """How many of each rank's ``shard_rows`` rows a block has that forward reads; of
    ``row_bytes`` bytes each, in the compute dtype."""
    at_once = LOOKUP_BYTES
    if ranks >= LOOKUP_RANKS:
        half = -(-shard_rows // 2) * ranks * row_bytes
        at_once = max(at_once, min(half, MOST_LOOKUP_BYTES))
    most = max(1, at_once // (ranks * row_bytes))
    # Blocks are of equal size, so that one's bytes serve the next.
    return -(-shard_rows // -(-shard_rows // most))


class EmbeddingRows:
    """What the calls of one embedding in a step share.

    ``unit`` owns ``stream``; ``weight`` is the full parameter, which has bytes only
    while the unit is gathered (``reshard_after_forward=False``, ``unshard``).
    """

    def __init__(
        self,
        unit: _C.Unit,
        weight: nn.Parameter,
        reduce_dtype: torch.dtype,
        *,
        fused: bool = False,
    ) -> None:
        self._reduce_dtype = reduce_dtype
        # Sums in fp32, not in the compute dtype.
        self._fused = fused
        row_bytes = weight.shape[1] * weight.element_size()
        self._unit, self._weight = unit, weight
        self._stream = unit.gradient_rows()
        shard, ranks = self._stream.padded_rows, self._stream.world_size
        unit.look_up_rows(lookup_rows(shard, ranks, row_bytes))
        # Recorded calls whose graphs are alive.
        self._calls: list[weakref.ref[Any]] = []
        # (indices, gradient of the output) of those whose gradients came, in the order
        # they came.
        self._arrived: PerBackward[dict[Any, tuple[Tensor, Tensor]]] = PerBackward()

    def forward(self, module: nn.Embedding, indices: Tensor) -> Tensor:
        """The module's forward, which torch.compile leaves alone: a loop of
        collectives."""
        # Inside a backward it is a recomputation: the first call delivers.
        recomputed = in_backward()
        if not (torch.is_grad_enabled() and self._weight.requires_grad):
            return self.look_up(indices)
        output = _Lookup.apply(
            self._weight, indices, module.padding_idx, self, not recomputed
        )
        assert isinstance(output, Tensor)
        if recomputed:
            return output
        self._calls = [call for call in self._calls if call() is not None]
        self._calls.append(weakref.ref(output.grad_fn))
        return output

    # What torch.compiler.disable sets, without importing the compiler.
    forward._torchdynamo_disable = True

    def run(
        self, forward: Callable[..., Any], module: Any, *args: Any, **kw: Any
    ) -> Any:
        """A forward of the program's own class, which sees the full weight."""
        shard = module._parameters["weight"]
        module._parameters["weight"] = self._weight
        try:
            look_up = functools.partial(self.forward, module)
            with _Lookups(module, self._weight, look_up):
                return forward(module, *args, **kw)
        finally:
            module._parameters["weight"] = shard

    run._torchdynamo_disable = True

    def look_up(self, indices: Tensor) -> Tensor:
        """The rows ``indices`` of the table. Collective unless it is gathered."""
        if not self._unit.looks_up_rows:
            return F.embedding(indices, self._weight.detach())
        flat, stream = _rows_of(indices), self._stream
        chunks = strided_chunks(stream.num_rows, stream.world_size, stream.lookup_rows)
        # One block holds each row; what is none of the table fails as ever.
        none = flat.lt(0).logical_or_(flat.ge(stream.num_rows))
        found: Tensor | None = None
        stream.begin_lookup()
        try:
            for block, chunk in enumerate(chunks):
                rows = stream.fetch(block)
                row, inside = chunk.place(flat)
                row = row.masked_fill_(none, chunk.num_rows)
                picked = rows.index_select(0, row)
                if found is None:
                    found = picked
                else:
                    torch.where(inside[:, None], picked, found, out=found)
        finally:
            stream.end()
        assert found is not None
        return found.view(*indices.shape, found.shape[-1])

    def deliver(
        self, node: Any, indices: Tensor, gradient: Tensor, padding_idx: int | None
    ) -> None:
        of_backward = self._arrived.get(dict)
        of_rows = gradient.reshape(indices.numel(), gradient.shape[-1])
        of_backward[node] = _rows_of(indices), of_rows
        calls = (call() for call in self._calls)
        waiting = (c for c in calls if c is not None and c not in of_backward)
        if any(torch._C._will_engine_execute_node(call) for call in waiting):
            return
        arrived = dict(of_backward)
        of_backward.clear()
        self._stream.begin_backward()
        dtype = gradient.dtype
        if self._stream.sums_as_reduced:
            dtype = self._reduce_dtype
        for block, chunk in enumerate(self._chunks()):
            if self._fused:
                rows = _sum_of(chunk, padding_idx, arrived.values())
            else:
                rows = functools.reduce(
                    Tensor.add_,
                    (
                        _gradient_of(chunk, padding_idx, *call).to(dtype)
                        for call in arrived.values()
                    ),
                )
            self._stream.put(block, rows)

    def dense_gradient(
        self, indices: Tensor, gradient: Tensor, padding_idx: int | None
    ) -> Tensor:
        padding = -1 if padding_idx is None else padding_idx
        return torch.ops.aten.embedding_dense_backward(
            gradient, indices, self._stream.num_rows, padding, False
        )

    def _chunks(self) -> tuple[RowChunk, ...]:
        stream = self._stream
        return strided_chunks(stream.num_rows, stream.world_size, stream.block_rows)


# -- classes of the program's own -----------------------------------------------------


class _Lookups(TorchFunctionMode):
    """Within, ``look_up(indices)`` stands for ``F.embedding`` of ``table``, with what
    ``module`` says of padding.

    Raises:
        NotImplementedError: For anything else that gets the table.
    """

    def __init__(
        self,
        module: nn.Embedding,
        table: nn.Parameter,
        look_up: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self._module, self._table, self._look_up = module, table, look_up

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if all(leaf is not self._table for leaf in tree_leaves((args, kwargs))):
            return function(*args, **kwargs)
        if function is F.embedding:
            asked = _EMBEDDING.bind(*args, **kwargs).arguments
            if self._is_of_the_module(asked):
                return self._look_up(asked["input"])
        elif getattr(function, "__name__", "") == "__get__":  # an attribute of it
            return function(*args, **kwargs)
        raise NotImplementedError(
            f"lowtide: {class_name(self._module)}: expected a forward that only looks "
            f"its table up, as when it was tried, got {torch.typename(function)}. "
            "Make what it does with the table a module of its own, around an "
            "nn.Embedding."
        )

    def _is_of_the_module(self, asked: dict[str, Any]) -> bool:
        changes = ("max_norm", "scale_grad_by_freq", "sparse")
        return (
            asked["weight"] is self._table
            and asked.get("padding_idx") == self._module.padding_idx
            and not any(asked.get(name) for name in changes)
        )


_EMBEDDING = inspect.signature(F.embedding)


def only_looks_up(module: nn.Embedding, original: type[nn.Module]) -> bool:
    """Whether the forward of ``module``, an ``original``, does nothing with its table
    but look up, and not in a checkpoint of its own, which would do it again with
    nobody there to give it the table. Of a class of the program's it is tried, with
    indices of two dimensions, on tensors without bytes."""
    # A forward of the user's may checkpoint the module's own.
    if any(module.children()) or "forward" in module.__dict__:
        return False
    return original is nn.Embedding or _trial(module, original)


def _trial(module: nn.Embedding, original: type[nn.Module]) -> bool:
    alike: Any = original.__new__(original)
    lookups: list[bool] = []
    outside = _saved_tensors_hooks()

    def look_up(indices: Tensor) -> Tensor:
        recorded = torch.is_grad_enabled() and _saved_tensors_hooks() == outside
        lookups.append(recorded)
        shape = (*indices.shape, module.embedding_dim)
        return indices.new_empty(shape, dtype=module.weight.dtype)

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            device = module.weight.device
            table = nn.Parameter(
                torch.empty(module.weight.shape, dtype=module.weight.dtype).to(device)
            )
            alike.__dict__ = module.__dict__ | {"_parameters": {"weight": table}}
            indices = torch.zeros(2, 3, dtype=torch.int64, device=device)
            with _Lookups(alike, table, look_up):
                output = original.forward(alike, indices)
    except Exception:
        return False
    return bool(lookups) and all(lookups) and isinstance(output, Tensor)


def _saved_tensors_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _rows_of(indices: Tensor) -> Tensor:
    """[n], int64 of either dtype that nn.Embedding takes; others fail as ever."""
    flat = indices.flatten()
    return flat.long() if flat.dtype == torch.int32 else flat


def _gradient_of(
    chunk: RowChunk, padding_idx: int | None, indices: Tensor, gradient: Tensor
) -> Tensor:
    """The rows of ``chunk``; what is not in it goes to a padding row behind them."""
    row, inside = chunk.place(indices)
    if padding_idx is not None:
        inside &= indices.ne(padding_idx)
    row = torch.where(inside, row, chunk.num_rows)
    rows = torch.ops.aten.embedding_dense_backward(
        gradient, row, chunk.num_rows + 1, chunk.num_rows, False
    )
    return rows[: chunk.num_rows]


def _sum_of(
    chunk: RowChunk, padding_idx: int | None, calls: Iterable[tuple[Tensor, Tensor]]
) -> Tensor:
    """The rows of ``chunk`` in fp32: one scatter a call, nothing between."""
    rows: Tensor | None = None
    for indices, gradient in calls:
        row, inside = chunk.place(indices)
        if padding_idx is not None:
            inside &= indices.ne(padding_idx)
        if rows is None:
            rows = gradient.new_zeros(
                (chunk.num_rows, gradient.shape[-1]), dtype=torch.float32
            )
        torch.ops.lowtide.add_rows_(rows, torch.where(inside, row, -1), gradient)
    assert rows is not None
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        indices: Tensor,
        padding_idx: int | None,
        rows: EmbeddingRows,
        delivers: bool,
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.padding_idx, ctx.rows, ctx.delivers = padding_idx, rows, delivers
        return rows.look_up(indices)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, None, None, None, None]:
        (indices,) = ctx.saved_tensors
        if ctx.delivers:
            ctx.rows.deliver(ctx, indices, gradient, ctx.padding_idx)
            return None, None, None, None, None
        # What a re-entrant checkpoint computed again has no first call.
        dense = ctx.rows.dense_gradient(indices, gradient, ctx.padding_idx)
        return dense, None, None, None, None
