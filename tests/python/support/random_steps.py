"""One rank of a sharded model beside the rule that it must equal, operation by
operation.

The rule keeps full fp32 masters, runs every rank's data through one copy in the compute
dtype, and averages what the ranks have accumulated in fp32 ([Note: The rule] in
reference.py). Both sides of an operation run in the same process; after each one every
shard, gradient and output has the rule's values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import lowtide
from support.bombs import Boom
from support.left_fold import left_fold
from support.training import local

RANKS, BLOCKS, WIDTH, TOKENS = 2, 3, 6, 11
REST = BLOCKS  # the number of what is in no block


@dataclass(frozen=True)
class Setup:
    wrap: str = "blocks"  # "blocks", "group" (norm and head are one unit), "root"
    compute: torch.dtype = torch.float32
    reshard: bool = True
    budget: int | None = None  # of gradient chunks, bytes
    embedding: bool = True


@dataclass(frozen=True)
class Pass:
    """A forward; by rank: how many rows, which blocks use their scale."""

    seed: int
    rows: tuple[int, ...] = (2, 2)
    scaled: tuple[tuple[bool, ...], ...] = ((True,) * BLOCKS,) * RANKS
    order: tuple[int, ...] = tuple(range(BLOCKS))
    head: bool = True
    checkpointed: bool = False


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, scaled: bool) -> Tensor:
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden * self.scale if scaled else hidden)


class Net(nn.Module):
    def __init__(self, embedding: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = (
            nn.Embedding(TOKENS, WIDTH) if embedding else nn.Linear(TOKENS, WIDTH)
        )
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, data: Tensor, run: Pass, rank: int) -> Tensor:
        x = self.stem(data)
        for number in run.order:
            arguments = (x, run.scaled[rank][number])
            block = self.blocks[number]
            if run.checkpointed:
                x = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x = block(*arguments)
        x = self.norm(x)
        return self.head(x) if run.head else x


def block_of(name: str) -> int:
    """The number of a parameter's block, or REST."""
    _, found, rest = name.partition("blocks.")
    return int(rest.split(".")[0]) if found else REST


Grads = dict[str, Tensor | None]


class Rule:
    def __init__(self, setup: Setup) -> None:
        self.masters, self.compute = Net(setup.embedding), Net(setup.embedding)
        self.compute.to(setup.compute)
        self.optimizer = torch.optim.SGD(self.masters.parameters(), lr=0.1)
        self.drop()
        self.refresh()

    def refresh(self) -> None:
        with torch.no_grad():
            for to, master in zip(
                self.compute.parameters(), self.masters.parameters(), strict=True
            ):
                to.copy_(master)

    def drop(self) -> None:
        self.optimizer.zero_grad()
        self.waiting: list[Grads] = [{} for _ in range(RANKS)]

    def clear(self, names: list[str], to_none: bool) -> None:
        for name in names:
            for waiting in self.waiting:
                waiting.pop(name, None)
            master = self.masters.get_parameter(name)
            if to_none or master.grad is None:
                master.grad = None
            else:
                master.grad.zero_()

    def add(self, rank: int, loss: Tensor, retain: bool) -> None:
        """A rank's gradients to what it has not reduced yet."""
        wanted = {n: p for n, p in self.compute.named_parameters() if p.requires_grad}
        if not loss.requires_grad or not wanted:
            return
        found = torch.autograd.grad(
            loss, list(wanted.values()), retain_graph=retain, allow_unused=True
        )
        waiting = self.waiting[rank]
        for name, grad in zip(wanted, found, strict=True):
            if grad is not None:
                before = waiting.get(name)
                waiting[name] = grad.float() if before is None else before + grad

    def reduce(self, sync: tuple[bool, ...]) -> None:
        for name, master in self.masters.named_parameters():
            by_rank = [waiting.get(name) for waiting in self.waiting]
            if not sync[block_of(name)] or all(grad is None for grad in by_rank):
                continue
            filled = [torch.zeros_like(master) if g is None else g for g in by_rank]
            mean = left_fold(filled, 0) / RANKS
            master.grad = mean if master.grad is None else master.grad + mean
            for waiting in self.waiting:
                waiting.pop(name, None)


class Session:
    """Both sides, on one rank."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rule = Rule(setup)
        self.model: Any = Net(setup.embedding)
        options: dict[str, Any] = {
            "reshard_after_forward": setup.reshard,
            "mp_policy": lowtide.MixedPrecisionPolicy(
                setup.compute, torch.float32, output_dtype=setup.compute
            ),
        }
        if setup.wrap != "root":
            for block in self.model.blocks:
                lowtide.fully_shard(block, **options)
        if setup.wrap == "group":
            lowtide.fully_shard([self.model.norm, self.model.head], **options)
        lowtide.fully_shard(self.model, **options)
        self.budget_is_set = setup.budget is None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        # Losses of forwards whose backward has not run: ours, and the rule's by rank.
        self.open: list[tuple[Tensor, list[Tensor]]] = []

    # -- operations ------------------------------------------------------------------

    def forward(self, run: Pass) -> None:
        if not self.budget_is_set and self.model._get_fsdp_state().root is not None:
            self.model._get_fsdp_state().root.gradient_budget = self.setup.budget
            self.budget_is_set = True
        rank = dist.get_rank()
        ours = self.model(self.data(run, rank), run, rank)
        theirs = [
            self.rule.compute(self.data(run, other), run, other)
            for other in range(RANKS)
        ]
        same("output", ours, theirs[rank])
        losses = [theirs_.float().square().sum() for theirs_ in theirs]
        if torch.is_grad_enabled():
            self.open.append((ours.float().square().sum(), losses))

    def evaluate(self, run: Pass) -> None:
        with torch.no_grad():
            self.forward(run)

    def backward(self, which: int, sync: tuple[bool, ...], retain: bool) -> None:
        loss, losses = self.open[which]
        if not retain:
            del self.open[which]
        self.model.set_requires_gradient_sync(sync[REST])
        if self.setup.wrap != "root":
            for number, block in enumerate(self.model.blocks):
                block.set_requires_gradient_sync(sync[number])
        if loss.requires_grad:
            loss.backward(retain_graph=retain)
        for rank, theirs in enumerate(losses):
            self.rule.add(rank, theirs, retain)
        self.rule.reduce(sync)

    def step(self) -> None:
        self.optimizer.step()
        self.rule.optimizer.step()
        self.rule.refresh()

    def zero_grad(self, what: str, to_none: bool) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        if what == "optimizer":
            self.optimizer.zero_grad(to_none)
        elif what == "model":
            self.model.zero_grad(to_none)
        else:
            self.model.blocks[1].zero_grad(to_none)
            names = [name for name in names if block_of(name) == 1]
        self.rule.clear(names, to_none)

    def freeze(self, name: str, frozen: bool) -> None:
        for model in (self.model, self.rule.masters, self.rule.compute):
            model.get_parameter(name).requires_grad_(not frozen)

    def unshard(self, number: int) -> None:
        if self.setup.wrap != "root":
            self.model.blocks[number].unshard()

    def fail(self, run: Pass, number: int, when: str) -> None:
        """All ranks alike; the step counts as skipped."""
        hook = self.model.blocks[number].register_forward_hook(
            explode if when == "forward" else explode_in_backward
        )
        rank = dist.get_rank()
        with pytest.raises(Boom):
            self.model(self.data(run, rank), run, rank).float().sum().backward()
        hook.remove()
        self.skip()

    def disagree(self, run: Pass) -> None:
        """Ranks that run units of one size in another order hear of it, all of them.
        Units of other sizes would end gloo's processes."""
        rank = dist.get_rank()
        order = tuple(range(BLOCKS))
        mine = replace(run, order=order if rank == 0 else order[::-1])
        self.model.set_requires_gradient_sync(True)
        with pytest.raises(RuntimeError, match="to run the same units in the same"):
            self.model(self.data(run, rank), mine, rank).float().sum().backward()
        self.skip()

    def skip(self) -> None:
        lowtide.abort_step(self.model)
        self.rule.drop()
        self.open.clear()

    def load(self) -> None:
        """What the model has, from a checkpoint."""
        state = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(state)

    # -- both sides ------------------------------------------------------------------

    def data(self, run: Pass, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(RANKS * run.seed + rank)
        rows = run.rows[rank]
        if self.setup.embedding:
            return torch.randint(TOKENS, (rows,), generator=generator)
        made = torch.randn(rows, TOKENS, generator=generator)
        return made.to(self.setup.compute)

    def compare(self) -> None:
        rank = dist.get_rank()
        for name, shard in self.model.named_parameters():
            master = self.rule.masters.get_parameter(name)
            if not isinstance(shard, DTensor):
                continue  # its unit is gathered
            rows = -(-master.shape[0] // RANKS)
            mine = slice(rows * rank, rows * (rank + 1))
            same(name, local(shard), master[mine])
            if shard.grad is None or master.grad is None:
                assert shard.grad is master.grad, (name, shard.grad, master.grad)
            else:
                same(f"{name}.grad", local(shard.grad), master.grad[mine])


def same(name: str, ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs), (name, ours, theirs)


def explode(*_: Any) -> None:
    raise Boom("forward of a block")


def explode_in_backward(module: Any, inputs: Any, output: Tensor) -> None:
    output.register_hook(explode)


_sessions: list[Session] = []


def start(setup: Setup) -> None:
    _sessions[:] = [Session(setup)]


def perform(operation: str, *arguments: Any) -> tuple[int, dict[str, str]]:
    """Of the session that was started last; returns how many losses wait for their
    backward."""
    (session,) = _sessions
    getattr(session, operation)(*arguments)
    session.compare()
    return len(session.open)
