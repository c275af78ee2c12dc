"""The rule a sharded run follows, in one process and without any sharding.

One process plays all data-parallel ranks in turn: the same masters in fp32, the
same compute in the parameter dtype, each rank's gradients accumulated in fp32,
then averaged.  With one or two ranks a sharded run must give the same bits; with
more, the order in which a backend adds is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

# Up to torch 2.14 FSDP2 has a gradient rounded to the parameter dtype before it is
# reduced in fp32; since then it is reduced as it was computed, a norm's in fp32.
ROUNDED = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)


class UnshardedReplicas(nn.Module):
    """Behaves like `module` whose parameters are cast for every forward.

    Gradients of the casts are widened to fp32 and added to `.grad`, microbatch by
    microbatch.
    """

    def __init__(
        self, module: nn.Module, *, num_ranks: int, param_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.module = module
        self.num_ranks = num_ranks
        self.param_dtype = param_dtype

    def forward(self, *args: Any) -> Any:
        cast = {n: self._cast(p) for n, p in self.module.named_parameters()}
        return functional_call(self.module, cast, args)

    def _cast(self, parameter: nn.Parameter) -> Tensor:
        cast = parameter.detach().to(self.param_dtype).requires_grad_()
        if not ROUNDED:
            cast.grad_dtype = None

        def widen(cast: Tensor) -> None:
            gradient, cast.grad = cast.grad.to(parameter.dtype), None
            if parameter.grad is not None:
                gradient = parameter.grad + gradient
            parameter.grad = gradient

        cast.register_post_accumulate_grad_hook(widen)
        return cast

    def accumulate(self, one_rank: Callable[[int], Tensor]) -> list[Tensor]:
        """Run `one_rank`, which calls backward, as every rank; average `.grad`.

        Returns what it returned, by rank.
        """
        parameters = list(self.module.parameters())
        returned = []
        totals: list[Tensor] = []
        for rank in range(self.num_ranks):
            returned.append(one_rank(rank))
            grads = [p.grad for p in parameters]
            self.module.zero_grad(set_to_none=True)
            if totals:
                torch._foreach_add_(totals, grads)
            else:
                totals = grads
        torch._foreach_div_(totals, self.num_ranks)
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total
        return returned

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` does it on `Shard(0)` gradients.

        Each parameter's norm is put together from the norms of its shards, so
        squares are added in another order than over the whole gradient.
        """
        parameters = list(self.module.parameters())
        shards = [p.grad.chunk(self.num_ranks) for p in parameters]
        squares = [
            torch.stack([torch.linalg.vector_norm(s[rank]) for s in shards]) ** 2
            for rank in range(self.num_ranks)
        ]
        norm = torch.linalg.vector_norm(torch.stack(squares).sum(0) ** 0.5)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
