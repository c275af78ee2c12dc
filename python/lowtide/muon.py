"""``lowtide.Muon``: torch's Muon for matrices that are sharded.

[Note: Owners of matrices]
Muon orthogonalises a matrix as a whole. Each has one rank that does, its owner, to
which the others send their rows of the momentum and which sends the result's rows back:
two all-to-alls for a batch of matrices of about one size. A batch ends where all ranks
together would own more than a matrix of the largest size each, and within it the
heaviest matrix goes to the rank that has the least to do. That depends on shapes alone,
so all ranks agree. The next batch's rows are on their way while this one is
orthogonalised. What travels is in bf16, to which torch's Newton-Schulz iteration rounds
before anything else, so the bits are those of the whole matrix; momentum stays sharded.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import _muon

from lowtide._sharding.local_parameter import sharded_of

__all__ = ["Muon"]


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` for sharded matrices: its arguments, numbers and states.

    A matrix is orthogonalised by one rank, a few at a time, and its momentum stays
    sharded. Parameters, momentum and states have the bits that ``torch.optim.Muon``
    gives whole matrices with the same gradients; state dicts cross, by
    ``torch.distributed.checkpoint`` too. torch's own, of ``DTensor``s, has collectives
    around every product and other bits.

    Serves ``DTensor``s that one dimension of their mesh shards, by rows or columns, and
    others replicate: each replica does the same. Also parameters of
    :func:`lowtide.local_parameters`, and plain ones, as torch does. All ranks of a mesh
    must have gradients of the same parameters.

    One difference: with ``nesterov=False`` and bf16 gradients torch normalises the
    momentum itself, in place; here it stays what it is.

    Raises:
        ValueError: As torch's, for parameters that are no matrices, biases say.
        NotImplementedError: For one that is sharded twice, as by tensor parallelism.
    """

    def __init__(self, params: Any, *args: Any, **settings: Any) -> None:
        super().__init__(params, *args, **settings)
        for group in self.param_groups:
            for p in group["params"]:
                _sharding_of(p)  # raises

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stepped: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, stepped, gradients, momenta)
            settings = _Settings(
                **{name: group[name] for name in _Settings.__dataclass_fields__}
            )
            whole: list[tuple[Tensor, Tensor, Tensor]] = []
            parts: dict[dist.ProcessGroup, list[_Matrix]] = {}
            for p, gradient, momentum in zip(stepped, gradients, momenta, strict=True):
                rows = _local(p), _local(gradient), _local(momentum)
                sharding = _sharding_of(p)
                if sharding is None:
                    whole.append(rows)
                else:
                    of_group = parts.setdefault(sharding[0], [])
                    of_group.append(_Matrix(*rows, sharded_of(p).shape, sharding[1]))
            _step_whole(whole, settings)
            for process_group, matrices in parts.items():
                _step_sharded(matrices, process_group, settings)
        return loss


@dataclass(frozen=True)
class _Settings:
    lr: Any  # a number or a tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    ns_steps: int
    eps: float
    adjust_lr_fn: str | None


@dataclass(frozen=True)
class _Matrix:
    """This rank's part of one, of its gradient and of its momentum."""

    part: Tensor
    gradient: Tensor
    momentum: Tensor
    shape: torch.Size  # of the whole
    dim: int  # that is sharded

    def part_of(self, rank: int, size: int) -> torch.Size:
        """As ``torch.chunk`` cuts, and ``DTensor`` with it."""
        longest = math.ceil(self.shape[self.dim] / size)
        begin = min(self.shape[self.dim], rank * longest)
        end = min(self.shape[self.dim], begin + longest)
        sizes = list(self.shape)
        sizes[self.dim] = end - begin
        return torch.Size(sizes)

    @property
    def cost(self) -> int:
        """In proportion to its multiplications."""
        return self.shape.numel() * min(self.shape)


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.as_subclass(Tensor)


def _sharding_of(p: Tensor) -> tuple[dist.ProcessGroup, int] | None:
    """The ranks that have parts of it, and the dimension they are cut in."""
    p = sharded_of(p)
    if not isinstance(p, DTensor):
        return None
    mesh, found = p.device_mesh, None
    for i, placement in enumerate(p.placements):
        if type(placement) is Replicate or mesh.size(i) == 1:
            continue
        if type(placement) is not Shard or found is not None:
            raise NotImplementedError(
                f"lowtide: Muon: parameter of shape {tuple(p.shape)}: expected one "
                "dimension of its mesh to shard it and others to replicate it, got "
                f"{p.placements}. Give it to another optimizer, or shard it once."
            )
        found = mesh.get_group(i), placement.dim % p.ndim
    return found


def _step_whole(
    matrices: Sequence[tuple[Tensor, Tensor, Tensor]], settings: _Settings
) -> None:
    parts, gradients, momenta = ([m[i] for m in matrices] for i in range(3))
    _muon.muon(parts, gradients, momenta, has_complex=False, **vars(settings))


def _step_sharded(
    matrices: Sequence[_Matrix], group: dist.ProcessGroup, settings: _Settings
) -> None:
    size = group.size()
    orthogonalise = functools.partial(
        _muon._zeropower_via_newtonschulz,
        ns_coefficients=settings.ns_coefficients,
        ns_steps=settings.ns_steps,
        eps=settings.eps,
    )
    costliest_first = sorted(matrices, key=lambda m: -m.cost)
    following = (_Batch(batch, group) for batch in batches(costliest_first, size))
    coming, leaving = next(following, None), None
    if coming is not None:
        coming.gather(settings)
    while coming is not None:
        batch, coming = coming, next(following, None)
        owned = batch.gathered()
        if coming is not None:
            coming.gather(settings)
        # Each goes as it has been read.
        batch.scatter([orthogonalise(owned.pop(0)) for _ in range(len(owned))])
        if leaving is not None:
            leaving.update(settings)
        leaving = batch
    if leaving is not None:
        leaving.update(settings)


def batches(matrices: Sequence[_Matrix], size: int) -> Iterator[list[_Matrix]]:
    """In order, none with more elements than ``size`` times the largest has."""
    most = size * max((m.shape.numel() for m in matrices), default=0)
    batch: list[_Matrix] = []
    elements = 0
    for matrix in matrices:
        if elements + matrix.shape.numel() > most:
            yield batch
            batch, elements = [], 0
        batch.append(matrix)
        elements += matrix.shape.numel()
    if batch:
        yield batch


def owners(costs: Sequence[int], size: int) -> list[int]:
    """Which of ``size`` ranks does what: the costliest first, each to the rank that has
    the least to do, of equal ones the first."""
    load = [0] * size
    owner = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner[i] = load.index(min(load))
        load[owner[i]] += costs[i]
    return owner


class _Batch:
    """Matrices that go to their owners together, and come back."""

    def __init__(self, matrices: Sequence[_Matrix], group: dist.ProcessGroup) -> None:
        self._group = group
        self._size, self._rank = group.size(), group.rank()
        owner = owners([m.cost for m in matrices], self._size)
        # By rank, in the order of matrices.
        self._of = [
            [m for m, o in zip(matrices, owner, strict=True) if o == rank]
            for rank in range(self._size)
        ]
        mine = self._of[self._rank]
        self._sent = [
            [m.part_of(self._rank, self._size) for m in of_rank] for of_rank in self._of
        ]
        self._received = [
            [m.part_of(rank, self._size) for m in mine] for rank in range(self._size)
        ]

    def gather(self, settings: _Settings) -> None:
        rows = (_update_of(m, settings) for of_rank in self._of for m in of_rank)
        self._begin(rows, self._sent, self._received)

    def gathered(self) -> list[Tensor]:
        """The matrices that this rank owns, in bf16."""
        parts = self._end()
        return [
            torch.cat([parts[rank][i] for rank in range(self._size)], m.dim)
            for i, m in enumerate(self._of[self._rank])
        ]

    def scatter(self, owned: Sequence[Tensor]) -> None:
        mine = self._of[self._rank]
        cut = [
            matrix.split([sizes[i][m.dim] for sizes in self._received], m.dim)
            for i, (m, matrix) in enumerate(zip(mine, owned, strict=True))
        ]
        rows = [parts[rank] for rank in range(self._size) for parts in cut]
        self._begin(rows, self._received, self._sent)

    def update(self, settings: _Settings) -> None:
        lr = _muon._to_scalar(settings.lr)
        for matrices, parts in zip(self._of, self._end(), strict=True):
            for m, orthogonal in zip(matrices, parts, strict=True):
                adjusted = _muon._adjust_lr(lr, settings.adjust_lr_fn, m.shape)
                m.part.mul_(1 - lr * settings.weight_decay)
                m.part.add_(orthogonal, alpha=-adjusted)

    def _begin(
        self,
        parts: Iterable[Tensor],
        sent: list[list[torch.Size]],
        received: list[list[torch.Size]],
    ) -> None:
        """Sends ``parts``, in the order of ranks."""
        out, into = ([_elements(sizes) for sizes in s] for s in (sent, received))
        device = self._device
        message = torch.empty(sum(out), dtype=torch.bfloat16, device=device)
        place = 0
        for part in parts:
            message[place : place + part.numel()].view(part.shape).copy_(part)
            place += part.numel()
        self._message = torch.empty(sum(into), dtype=torch.bfloat16, device=device)
        self._parts = received
        self._work: Any = dist.all_to_all_single(
            self._message, message, into, out, group=self._group, async_op=True
        )
        self._source = message  # until it has left

    def _end(self) -> list[list[Tensor]]:
        """By the rank they came from."""
        self._work.wait()
        sizes = [_elements(parts) for parts in self._parts]
        messages = self._message.split(sizes)
        del self._message, self._source, self._work  # all three hold bytes
        return [
            [
                flat.view(part)
                for flat, part in zip(
                    message.split([part.numel() for part in parts]), parts, strict=True
                )
            ]
            for message, parts in zip(messages, self._parts, strict=True)
        ]

    @property
    def _device(self) -> torch.device:
        return next(m.part.device for of_rank in self._of for m in of_rank)


def _elements(sizes: Iterable[torch.Size]) -> int:
    return sum(one.numel() for one in sizes)


def _update_of(m: _Matrix, settings: _Settings) -> Tensor:
    """What is orthogonalised, this rank's part; the momentum moves."""
    m.momentum.lerp_(m.gradient, 1 - settings.momentum)
    if settings.nesterov:
        return m.gradient.lerp(m.momentum, settings.momentum)
    return m.momentum
