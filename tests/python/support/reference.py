"""The numerics contract as a program of one process.

[Note: The rule]
Masters are fp32.  At the start of a step each is rounded once to the compute
dtype, and every rank and microbatch runs forward and backward on those values.
A rank's gradient of one backward is autograd's own, in the compute dtype.

  sync last:  acc = g1.to(reduce); acc += g_j       on each rank
              G = average over ranks of acc
  sync each:  G = average of g1.to(reduce); G += average of g_j.to(reduce)

The average is the left fold over ranks in the reduce dtype
([Note: The left fold]), divided by N there, then cast to fp32; G is fp32.
A parameter that a rank did not use counts as zero there; one that no rank used
has no gradient.  AdamW runs on the fp32 masters.

The rule must run on one thread, like the ranks: a matmul may round differently
on two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from support.left_fold import left_fold
from support.model import batch, build, loss_fn
from support.training import Run, Trace, adamw

Grads = dict[str, torch.Tensor | None]


def owned_rows(num_rows: int, world_size: int) -> list[slice]:
    """The rows of each rank under Shard(0)."""
    rows = -(-num_rows // world_size)
    return [
        slice(min(r * rows, num_rows), min((r + 1) * rows, num_rows))
        for r in range(world_size)
    ]


def average(by_rank: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """What the ranks hold together once each owner has summed its rows."""
    used = [tensor for tensor in by_rank if tensor is not None]
    if not used:
        return None
    world_size = len(by_rank)
    filled = [torch.zeros_like(used[0]) if t is None else t for t in by_rank]
    if world_size == 1:
        return filled[0].float()
    owned = [
        left_fold([tensor[rows] for tensor in filled], owner) / world_size
        for owner, rows in enumerate(owned_rows(used[0].shape[0], world_size))
    ]
    return torch.cat(owned).float()


def average_all(by_rank: Sequence[Grads]) -> Grads:
    return {name: average([grads[name] for grads in by_rank]) for name in by_rank[0]}


def add(total: Grads, more: Grads) -> Grads:
    """`total` += `more`, in the dtype of `total`."""
    for name, grad in more.items():
        previous = total[name]
        if grad is not None:
            total[name] = grad if previous is None else previous.add_(grad)
    return total


def cast(grads: Grads, dtype: torch.dtype | None) -> Grads:
    return {
        name: None if grad is None else grad.to(dtype or grad.dtype, copy=True)
        for name, grad in grads.items()
    }


class Rule:
    """Masters, optimizer and one compute copy that stands for every rank."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.masters = build(run.model)
        self.compute = build(run.model)
        if run.param_dtype is not None:
            self.compute.to(run.param_dtype)
        self.optimizer = adamw(self.masters, **dict(run.adamw))

    def refresh(self) -> None:
        with torch.no_grad():
            for to, master in zip(
                self.compute.parameters(), self.masters.parameters(), strict=True
            ):
                to.copy_(master)

    def backward(self, step: int, microbatch: int, rank: int) -> tuple[float, Grads]:
        """Loss and gradients of one rank, in the compute dtype."""
        inputs, targets = batch(self.run.model, step, microbatch, rank)
        self.compute.zero_grad()
        loss = loss_fn(self.compute(inputs), targets) / self.run.microbatches
        loss.backward()
        grads = {name: p.grad for name, p in self.compute.named_parameters()}
        return loss.item(), grads

    def accumulate(self, step: int) -> tuple[list[list[float]], Grads]:
        """Losses [rank][microbatch] and the full reduced gradients."""
        run = self.run
        losses: list[list[float]] = [[] for _ in range(run.world_size)]
        accumulated: list[Grads] = []
        reduced: Grads | None = None
        self.refresh()
        for microbatch in range(run.microbatches):
            backwards = []
            for rank in range(run.world_size):
                loss, grads = self.backward(step, microbatch, rank)
                losses[rank].append(loss)
                backwards.append(grads)
            if run.sync == "last":
                accumulated = [
                    add(total, grads) if microbatch else cast(grads, run.reduce_dtype)
                    for total, grads in zip(
                        accumulated or backwards, backwards, strict=True
                    )
                ]
                continue
            mean = average_all([cast(grads, run.reduce_dtype) for grads in backwards])
            reduced = mean if reduced is None else add(reduced, mean)
        if reduced is None:
            reduced = average_all(accumulated)
        return losses, reduced


def train_by_rule(run: Run) -> list[Trace]:
    """One trace per rank, each with full tensors."""
    assert torch.get_num_threads() == 1 and run.clip is None
    rule = Rule(run)
    traces = [Trace() for _ in range(run.world_size)]
    for step in range(run.num_steps):
        losses, reduced = rule.accumulate(step)
        for name, master in rule.masters.named_parameters():
            master.grad = reduced[name]
        rule.optimizer.step()
        params = {n: p.detach().clone() for n, p in rule.masters.named_parameters()}
        for trace, rank_losses in zip(traces, losses, strict=True):
            trace.losses.append(rank_losses)
            trace.grads.append(reduced)
            trace.params.append(params)
    return traces
