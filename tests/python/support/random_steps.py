"""One rank of a sharded model beside the rule that it must equal, operation by
operation.

The rule keeps full fp32 masters, runs every rank's data through one copy in the compute
dtype, and averages what the ranks have accumulated in fp32 ([Note: The rule] in
reference.py). Both sides of an operation run in the same process; after each one every
shard, gradient and output has the rule's values, and what the ranks have asked of their
communicators is told, call by call, for the other ranks to compare.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _dump_fr_trace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._sharding import embedding
from lowtide._torch_version import VERSION
from support.bombs import Boom
from support.extended import Bf16Weight
from support.left_fold import left_fold
from support.training import local

LARGE_TABLE, LOOKUP_BYTES = embedding.LARGE_TABLE, embedding.LOOKUP_BYTES
RANKS, BLOCKS, WIDTH, TOKENS = 2, 3, 6, 11
MICROBATCHES = 4
# In later forwards, and in the first one.
DISAGREE = "every rank to run the same units|the same units and parameters in the same"
REST = BLOCKS  # the number of what is in no block


@dataclass(frozen=True)
class Setup:
    wrap: str = "blocks"  # "blocks", "group" (norm and head are one unit), "root"
    compute: torch.dtype = torch.float32
    reshard: bool = True
    budget: int | None = None  # of gradient chunks, bytes
    stem: str = "embedding"  # "linear", "rows" (an embedding that is never gathered)
    replicas: bool = False  # the ranks are replicas and not shards
    two_meshes: bool = False  # to blocks' first layers they are the other of the two
    nested: bool = False  # blocks' first layers are units inside them
    extended: bool = False  # blocks' matrices are tensors that travel in bf16
    offload: bool = False  # shards and gradients are the host's

    @property
    def pipelines(self) -> bool:
        """A split backward needs gathered parameters and a gradient of the input."""
        return self.stem == "linear" and not self.reshard


@dataclass(frozen=True)
class Pass:
    """A forward. By rank: how many rows, which blocks use their scale, whether the
    inputs want a gradient, whether the rank keeps what it has computed."""

    seed: int
    rows: tuple[int, ...] = (2, 2)
    scaled: tuple[tuple[bool, ...], ...] = ((True,) * BLOCKS,) * RANKS
    order: tuple[int, ...] = tuple(range(BLOCKS))
    aside: int | None = None  # a block whose input is cut off from the graph
    head: bool = True
    checkpointed: bool = False
    chunks: int = 0  # of a head that runs behind the model's forward
    penalty: bool = False  # of the slope at the input: a gradient of a gradient
    wanted: tuple[bool, ...] = (False,) * RANKS
    kept: tuple[bool, ...] = (False,) * RANKS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, scaled: bool) -> Tensor:
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden * self.scale if scaled else hidden)


class Net(nn.Module):
    def __init__(self, stem: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = (
            nn.Linear(TOKENS, WIDTH)
            if stem == "linear"
            else nn.Embedding(TOKENS, WIDTH)
        )
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.told: tuple[Pass, int]  # for a schedule, which hands over tensors alone

    def forward(self, data: Tensor, run: Pass | None = None, rank: int = 0) -> Tensor:
        run, rank = (run, rank) if run else self.told
        x = self.stem(data)
        for number in run.order:
            aside = number == run.aside
            entry = x.detach().requires_grad_(run.wanted[rank]) if aside else x
            arguments = (entry, run.scaled[rank][number])
            block = self.blocks[number]
            if run.checkpointed:
                out = checkpoint(block, *arguments, use_reentrant=False)
            else:
                out = block(*arguments)
            x = x + out if aside else out
        x = self.norm(x)
        return self.head(x) if run.head and not run.chunks else x


def outputs_and_loss(
    model: Any, data: Tensor, run: Pass, rank: int
) -> tuple[Tensor, Tensor, Any]:
    """The output, the loss, and what a program may keep of them."""
    recorded = torch.is_grad_enabled() and data.is_floating_point()
    if recorded and (run.penalty or run.wanted[rank]):
        data.requires_grad_()
    out = model(data, run, rank)
    if run.chunks:
        out = torch.cat([model.head(part) for part in out.tensor_split(run.chunks)])
    loss = out.float().square().sum()
    slope = None
    if recorded and run.penalty:
        (slope,) = torch.autograd.grad(out.float().sum(), data, create_graph=True)
        loss = loss + slope.float().square().sum()
    return out, loss, (loss, slope)


class Chunks:
    def __init__(
        self, head: Any, out: Tensor, count: int, together: bool, wanted: bool
    ) -> None:
        self.head, self.out, self.together = head, out, together
        parts = out.tensor_split(count)
        self.cut = [part.detach().requires_grad_(wanted) for part in parts]

    def loss(self, number: int) -> Tensor:
        """Of a chunk, or behind all of them of what is in front of the head."""
        if number < len(self.cut):
            return self.head(self.cut[number]).float().square().sum()
        loss = (self.out * self.gradient()).sum()
        if not self.together:
            return loss
        return loss + self.head(self.cut[0]).float().square().sum()

    def gradient(self) -> Tensor:
        return torch.cat([p if p.grad is None else p.grad for p in self.cut]).detach()


def block_of(name: str) -> int:
    """The number of a parameter's block, or REST."""
    _, found, rest = name.partition("blocks.")
    return int(rest.split(".")[0]) if found else REST


Grads = dict[str, Tensor | None]


def extend(net: Net) -> None:
    for block in net.blocks:
        assert isinstance(block, Block)
        block.up.weight = nn.Parameter(Bf16Weight(block.up.weight.detach()))


class Rule:
    def __init__(self, setup: Setup) -> None:
        self.extended = setup.extended
        self.masters, self.compute = Net(setup.stem), Net(setup.stem)
        self.compute.to(setup.compute)
        self.optimizer = torch.optim.SGD(self.masters.parameters(), lr=0.1)
        self.drop()
        self.refresh()

    def refresh(self) -> None:
        with torch.no_grad():
            for name, master in self.masters.named_parameters():
                travels = self.extended and name.endswith("up.weight")
                value = master.bfloat16() if travels else master
                self.compute.get_parameter(name).copy_(value)

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

    def add(
        self, rank: int, loss: Tensor, retain: bool, sync: tuple[bool, ...]
    ) -> None:
        """A rank's gradients to what it has not reduced yet."""
        wanted = {n: p for n, p in self.compute.named_parameters() if p.requires_grad}
        if not loss.requires_grad or not wanted:
            return
        if VERSION >= (2, 15):
            # [Note: The dtype of a gradient] in arriving_gradients.h: what several
            # uses give is added up in fp32 where nothing waits and nothing is reduced.
            for name, p in wanted.items():
                adds = sync[block_of(name)] or name in self.waiting[rank]
                p.grad_dtype = None if adds else torch.float32
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
        self.rank = dist.get_rank()
        self.rule = Rule(setup)
        self.model: Any = Net(setup.stem)
        if setup.extended:
            extend(self.model)
        options: dict[str, Any] = {
            "reshard_after_forward": setup.reshard,
            "mp_policy": lowtide.MixedPrecisionPolicy(
                setup.compute, torch.float32, output_dtype=setup.compute
            ),
        }
        if setup.offload:
            options["offload_policy"] = lowtide.CPUOffloadPolicy()
        shards = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shards",))
        replicas = init_device_mesh(
            "cpu", (RANKS, 1), mesh_dim_names=("replicas", "shards")
        )
        options["mesh"] = replicas if setup.replicas else shards
        if setup.two_meshes:
            first = {p for block in self.model.blocks for p in block.up.parameters()}
            other = lowtide.ShardPlacementResult(
                None, shards if setup.replicas else replicas
            )
            options["shard_placement_fn"] = lambda p: other if p in first else None
        if setup.wrap != "root":
            for block in self.model.blocks:
                if setup.nested:
                    lowtide.fully_shard(block.up, **options)
                lowtide.fully_shard(block, **options)
        # By one row of every rank at a time, where no table is too small.
        embedding.LARGE_TABLE = 0 if setup.stem == "rows" else LARGE_TABLE
        embedding.LOOKUP_BYTES = 1 if setup.stem == "rows" else LOOKUP_BYTES
        if setup.stem == "rows":
            lowtide.fully_shard(self.model.stem, **options)
        if setup.wrap == "group":
            lowtide.fully_shard([self.model.norm, self.model.head], **options)
        lowtide.fully_shard(self.model, **options)
        self.budget_is_set = setup.budget is None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.pipeline = (
            init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("stages", "shards"))
            if setup.pipelines
            else None
        )
        # Losses of forwards whose backward has not run: ours, and the rule's by rank.
        self.open: list[tuple[Tensor, list[Tensor]]] = []
        self.kept: list[Any] = []
        self.listening: dict[str, Any] = {}

    # -- operations ------------------------------------------------------------------

    def forward(self, run: Pass) -> None:
        if not self.budget_is_set and self.model._get_fsdp_state().root is not None:
            self.model._get_fsdp_state().root.gradient_budget = self.setup.budget
            self.budget_is_set = True
        ours, loss, held = self.run_model(run)
        theirs = [
            outputs_and_loss(self.rule.compute, self.data(run, rank), run, rank)
            for rank in range(RANKS)
        ]
        same("output", ours, theirs[self.rank][0])
        if torch.is_grad_enabled():
            self.open.append((loss, [one[1] for one in theirs]))
            if run.kept[self.rank]:
                self.kept = [*self.kept[-1:], held]

    def run_model(self, run: Pass) -> tuple[Tensor, Tensor, Any]:
        data = self.data(run, self.rank)
        return outputs_and_loss(self.model, data, run, self.rank)

    def evaluate(self, run: Pass) -> None:
        with torch.no_grad():
            self.forward(run)

    def backward(
        self, which: int, sync: tuple[bool, ...], retain: bool, kept: tuple[bool, ...]
    ) -> None:
        """``kept``: on which ranks the graph stays though nobody goes through it."""
        loss, losses = self.open[which]
        if not retain:
            del self.open[which]
        self.set_sync(sync)
        if loss.requires_grad:
            loss.backward(retain_graph=retain or kept[self.rank])
        for rank, theirs in enumerate(losses):
            self.rule.add(rank, theirs, retain, sync)
        self.rule.reduce(sync)

    def set_sync(self, sync: tuple[bool, ...]) -> None:
        self.model.set_requires_gradient_sync(sync[REST])
        if self.setup.wrap != "root":
            for number, block in enumerate(self.model.blocks):
                block.set_requires_gradient_sync(sync[number])

    def chunked(
        self, run: Pass, syncs: list[tuple[bool, ...]], together: bool, partly: bool
    ) -> None:
        """A backward for the head on each chunk of what the model gave, cut off from
        it, and one through the model; if ``together``, through the head once more.
        ``partly``: only ranks whose inputs want gradients take the head's."""
        rule = self.rule.compute
        ours = self.model(self.data(run, self.rank), run, self.rank)
        theirs = [rule(self.data(run, rank), run, rank) for rank in range(RANKS)]
        wanted = [want or not partly for want in run.wanted]
        mine = Chunks(self.model.head, ours, run.chunks, together, wanted[self.rank])
        rules = [
            Chunks(rule.head, out, run.chunks, together, want)
            for out, want in zip(theirs, wanted, strict=True)
        ]
        for number, sync in enumerate(syncs):
            if number == run.chunks:
                same("gradient", mine.gradient(), rules[self.rank].gradient())
            self.set_sync(sync)
            mine.loss(number).backward()
            for rank, chunks in enumerate(rules):
                loss = chunks.loss(number)
                self.rule.add(rank, loss, True, sync)
                if number < run.chunks and chunks.cut[number].requires_grad:
                    loss.backward(inputs=[chunks.cut[number]])
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
        """For good: what is frozen while it is gathered counts for as long."""
        for module in self.model.modules():
            if isinstance(module, lowtide.FSDPModule):
                module.reshard()
        for model in (self.model, self.rule.masters, self.rule.compute):
            model.get_parameter(name).requires_grad_(not frozen)

    def unshard(self, number: int) -> None:
        if self.setup.wrap != "root":
            self.model.blocks[number].unshard()

    def peek(self, run: Pass, number: int) -> None:
        """Keeps a view of a weight beyond its unit's forward, and reads it."""
        seen: list[Tensor] = []
        name = f"blocks.{number}." + ("down" if self.setup.nested else "up")
        layer = self.model.get_submodule(name)
        hook = layer.register_forward_hook(
            lambda *_: seen.append(layer.weight.detach()[:1])
        )
        self.evaluate(run)
        hook.remove()
        weight = self.rule.compute.get_parameter(f"{name}.weight")
        if isinstance(layer.weight, DTensor):
            with pytest.raises(RuntimeError, match="expected a read while its unit"):
                seen[-1].clone()
        else:
            same("kept", seen[-1], weight[:1])

    def listen(self, name: str, rank: int) -> None:
        """A hook on one rank's gradient, as for a log; a second time it goes."""
        parameter = self.model.get_parameter(name)
        if name in self.listening:
            self.listening.pop(name).remove()
        elif isinstance(parameter, DTensor) and parameter.requires_grad:
            self.listening[name] = (
                parameter.register_post_accumulate_grad_hook(lambda _: None)
                if rank == self.rank
                else Silent()
            )

    def fail(self, run: Pass, number: int, when: str) -> None:
        """All ranks alike; the step counts as skipped."""
        hook = self.model.blocks[number].register_forward_hook(
            explode if when == "forward" else explode_in_backward
        )
        with pytest.raises(Boom):
            self.run_model(run)[1].backward()
        hook.remove()
        self.skip()

    def disagree(self, run: Pass, what: str) -> None:
        """Ranks that run units of one size in another order, freeze other parameters or
        divide by another factor hear of it, all of them. Units of other sizes would end
        gloo's processes."""
        block = self.model.blocks[1]
        differs = self.rank == 1
        order = tuple(range(BLOCKS))
        if what == "order" and differs:
            order = order[::-1]
        frozen = block.down.bias.requires_grad
        self.model.set_requires_gradient_sync(True)
        block.set_gradient_divide_factor(7.0 if what == "factor" and differs else 2.0)
        if what == "frozen" and differs:
            block.down.bias.requires_grad_(not frozen)
        if what == "order":
            self.skip()  # a unit whose gradients wait is reduced in another size
            # What is gathered ahead, by the order of the last forward, would be
            # gathered on one rank alone; the ranks could not go on.
            with torch.no_grad():
                self.run_model(replace(run, order=tuple(range(BLOCKS))))
        with pytest.raises(RuntimeError, match=DISAGREE):
            self.run_model(replace(run, order=order))[1].backward()
        self.skip()
        block.set_gradient_divide_factor(2.0)
        block.down.bias.requires_grad_(frozen)

    def skip(self) -> None:
        lowtide.abort_step(self.model)
        self.rule.drop()
        self.open.clear()

    def load(self, assign: bool) -> None:
        """What the model has, from a checkpoint. With ``assign`` its tensors become the
        parameters, which want an optimizer of their own and have no gradients."""
        state = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(state, assign=assign)
        if assign:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.rule.clear([name for name, _ in self.model.named_parameters()], True)
            self.listening.clear()

    def zero_bubble(self, run: Pass) -> None:
        """A step of torch's schedule that takes the gradients of inputs and those of
        weights apart; the stage in front is not sharded."""
        assert self.pipeline is not None
        made = {rank: self.data(run, rank) for rank in range(RANKS)}
        self.model.set_requires_gradient_sync(True)
        if VERSION >= (2, 15):
            # A new stage learns its shapes from a backward, and clears gradients.
            self.rule.clear([name for name, _ in self.model.named_parameters()], True)
        run_zero_bubble(
            self.model, self.pipeline.get_group("stages"), made[self.rank], run
        )
        all_of_them = (True,) * (BLOCKS + 1)
        for rank, data in made.items():
            for part in data.chunk(MICROBATCHES):
                # Memory of its own, as behind a stage: BLAS rounds by alignment.
                alone = part.clone()
                loss = outputs_and_loss(self.rule.compute, alone, run, rank)[1]
                self.rule.add(rank, loss, False, all_of_them)
        self.rule.reduce(all_of_them)
        for master in self.rule.masters.parameters():
            if master.grad is not None:
                master.grad /= MICROBATCHES

    # -- both sides ------------------------------------------------------------------

    def data(self, run: Pass, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(RANKS * run.seed + rank)
        rows = run.rows[rank]
        if self.setup.stem != "linear":
            return torch.randint(TOKENS, (rows,), generator=generator)
        made = torch.randn(rows, TOKENS, generator=generator)
        return made.to(self.setup.compute)

    def compare(self) -> None:
        for name, shard in self.model.named_parameters():
            master = self.rule.masters.get_parameter(name)
            if not isinstance(shard, DTensor):
                continue  # its unit is gathered
            rows = -(-master.shape[0] // RANKS)
            mine = slice(rows * self.rank, rows * (self.rank + 1))
            if self.setup.replicas != (self.setup.two_meshes and ".up." in name):
                mine = slice(None)
            same(name, values_of(shard), master[mine])
            if shard.grad is None or master.grad is None:
                assert shard.grad is master.grad, (name, shard.grad, master.grad)
            else:
                same(f"{name}.grad", values_of(shard.grad), master.grad[mine])


def values_of(shard: Tensor) -> Tensor:
    mine = local(shard)
    return mine._data if isinstance(mine, Bf16Weight) else mine


class Front(nn.Module):
    """A stage whose output wants a gradient and has the input's bits."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one.to(x.dtype)


def run_zero_bubble(model: Any, group: Any, data: Tensor, run: Pass) -> None:
    stages = [
        PipelineStage(module, index, 2, torch.device("cpu"), group=group)
        for index, module in enumerate((Front(), model))
    ]
    for stage in stages:
        # Gloo has no connection from a rank to itself, which a V would open.
        stage._get_init_p2p_neighbors_ops = lambda: []  # type: ignore[method-assign]
    schedule = ScheduleInterleavedZeroBubble(
        stages, MICROBATCHES, loss_fn=lambda out, _: out.float().square().sum()
    )
    model.told = run, dist.get_rank()
    schedule.step(data, target=data)


class Silent:
    def remove(self) -> None:
        pass


def same(name: str, ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs), (name, ours, theirs)


def explode(*_: Any) -> None:
    raise Boom("forward of a block")


def explode_in_backward(module: Any, inputs: Any, output: Tensor) -> None:
    output.register_hook(explode)


Operation = tuple[str, tuple[Any, ...]]
# Of one operation: communicator, kind and sizes of each collective.
CallLog = list[tuple[str, str, Any]]


def perform(setup: Setup, operations: list[Operation]) -> list[CallLog]:
    session = Session(setup)
    take = call_log()
    logs = []
    for number, (operation, arguments) in enumerate(operations):
        try:
            getattr(session, operation)(*arguments)
            session.compare()
        except Exception as error:
            # For whoever reads the ranks' tracebacks.
            raise AssertionError(
                f"operation {number} of {setup}: {operation}{arguments}"
            ) from error
        logs.append(take())
    return logs


def call_log() -> Callable[[], CallLog]:
    """What this rank has asked of all its communicators since the last call, by torch's
    flight recorder (TORCH_FR_BUFFER_SIZE)."""
    seen = -1

    def take() -> CallLog:
        nonlocal seen
        trace = pickle.loads(_dump_fr_trace(includeStackTraces=False))
        entries = [e for e in trace.get("entries", ()) if e["record_id"] > seen]
        entries.sort(key=lambda entry: entry["record_id"])
        if entries:
            seen = entries[-1]["record_id"]
        return [
            (e["process_group"][1], e["profiling_name"], e["input_sizes"])
            for e in entries
        ]

    take()
    return take
