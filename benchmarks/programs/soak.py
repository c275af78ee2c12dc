"""A training that goes on and on, with everything that happens to one.

Four ranks, two of them a tensor- and sequence-parallel axis. The steps of a cycle are
trained on a world of two shards, then on one rank a part, on two replicas, and on two
shards again: between them ranks save, destroy their process groups, meet in a world of
another size and load. In between evaluations, saves, and faults, each of which undoes a
step that is then tried again. At the end of every cycle, when all ranks stand alike, a
rank says what it holds (`footprint.py`) and the bits of what it has trained.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import hashlib
import itertools
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from footprint import sample
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import lowtide
from lowtide._base.memory import device_memory
from lowtide.sequence_parallel import ColumnParallelLinear, RowParallelLinear
from lowtide.stepping import StepUndone
from support.bombs import Boom
from support.breaking import BreaksAt, interrupt

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from llama_parallel import SumOfGradients

RANKS, AXIS = 4, 2
# Every shard of a parameter is whole vectors of any processor: what is left over is
# computed by other instructions, which may round otherwise.
VOCAB, WIDTH, TOKENS, BATCH = 64, 64, 8, 2
MINUTES = datetime.timedelta(minutes=5)
LAYOUTS = {  # parts a tensor-parallel rank's parameters have: (replicas, shards)
    "two shards": (1, 2),
    "one rank": (1, 1),
    "two replicas": (2, 1),
}


@dataclass(frozen=True)
class Plan:
    steps: int
    cycle: int = 100  # steps between two samples
    disturbed: bool = True  # evaluations, saves, faults, resizes; else steps alone
    leak: str = ""  # what is kept of every step, one of LEAKS

    def layout(self, step: int) -> str:
        """Of the world that a step of this number is trained on."""
        if not self.disturbed:
            return "two shards"
        fifth = 5 * (step % self.cycle) // self.cycle
        return [*2 * ["two shards"], "one rank", "two replicas", "two shards"][fifth]

    def microbatches(self, step: int) -> int:
        """Of all ranks together, disturbed or not. One rank alone takes two, whose sum
        two ranks have, too: sums of more depend on who adds what."""
        alone = Plan(self.steps, self.cycle).layout(step) == "one rank"
        return 2 if alone or step % 3 == 0 else 4


# -- the model on a world --------------------------------------------------------------


class Local(nn.Module):
    """A layer that all ranks of the axis have, for their own tokens each."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(F.linear(x, SumOfGradients.apply(self.weight, self.group)))


class FeedForward(nn.Module):
    """All tokens, and this rank's columns."""

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, WIDTH, group=tp, name="ffn_in")
        self.down = RowParallelLinear(WIDTH, WIDTH, group=tp)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Net(nn.Module):
    """This rank's tokens and targets, [tokens, batch], to the sum of their losses."""

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        self.group = tp.get_group()
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.first, self.second = Local(self.group), FeedForward(tp)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        table = SumOfGradients.apply(self.table, self.group)
        # A layer's input leaves when the next one begins, so the first runs twice.
        x = self.second(self.first(self.first(F.embedding(tokens, table))))
        logits = F.linear(F.rms_norm(x, (WIDTH,)), table).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Training:
    """The model and its optimizer on this rank of a world; ``at[place]`` is called
    once when the place is reached."""

    def __init__(self, layout: str) -> None:
        replicas, shards = LAYOUTS[layout]
        self.mesh = mesh = init_device_mesh(
            "cpu", (replicas, shards, AXIS), mesh_dim_names=("replicas", "shards", "tp")
        )
        self.dp: DeviceMesh = (
            mesh["replicas", "shards"] if replicas > 1 else mesh["shards"]
        )
        self.group = self.dp.get_group(0)
        self.parts = replicas * shards
        self.part = dist.get_group_rank(self.group, dist.get_rank())
        self.tp = mesh["tp"].get_local_rank()
        self.at: dict[str, Callable[[], None]] = {}
        torch.manual_seed(self.tp)
        self.model: Any = Net(mesh["tp"])
        first, second = self.model.first, self.model.second
        lowtide.checkpoint(
            first, lowtide.ActivationPolicy(offload=["input"], prefetch=0)
        )
        first.register_forward_pre_hook(self._in_first)
        second.register_forward_hook(self._behind_second)
        precision = lowtide.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
        # What runs twice: from torch 2.15 on FSDP2 rounds the sum of what several uses
        # give, or does not, by what is there to add to.
        twice = lowtide.MixedPrecisionPolicy(param_dtype=torch.float32)
        for unit in (first, second, self.model):
            policy = twice if unit is first else precision
            lowtide.fully_shard(unit, mesh=self.dp, mp_policy=policy)
            # A sum: its bits do not depend on how many ranks there are.
            unit.set_gradient_divide_factor(1.0)
        # Of DTensors torch would keep an entry of its cache for every step: the step
        # size is in the key.
        self.optimizer = torch.optim.AdamW(
            lowtide.local_parameters(self.model), lr=1e-3
        )

    def reached(self, place: str) -> None:
        if (act := self.at.pop(place, None)) is not None:
            act()

    def _in_first(self, *_: Any) -> None:
        again = torch._C._current_graph_task_id() != -1
        self.reached("recomputation" if again else "forward")

    def _behind_second(self, module: Any, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: self.reached("backward"))

    def loss(self, step: int, microbatch: int) -> Tensor:
        generator = torch.Generator().manual_seed(8 * step + microbatch)
        start = torch.randint(VOCAB, (1, BATCH), generator=generator)
        tokens = (start + torch.arange(TOKENS + 1)[:, None]) % VOCAB
        mine = slice(self.tp * TOKENS // AXIS, (self.tp + 1) * TOKENS // AXIS)
        return self.model(tokens[:-1][mine], tokens[1:][mine])

    def step(self, step: int, microbatches: int) -> None:
        mine = microbatches // self.parts
        each = step % 2 == 0  # reduces the gradients of each microbatch, or their sum
        with gathers_again(step):
            for number in range(mine):
                self.reached("data")
                self.model.set_requires_gradient_sync(each or number == mine - 1)
                loss = self.loss(step, mine * self.part + number)
                (loss / microbatches).backward()
        self.reached("gradients")
        breaking, self.breaking = self.breaking, contextlib.nullcontext()
        with breaking:
            self.optimizer.step()
        self.reached("behind the optimizer")
        self.optimizer.zero_grad()

    breaking: Any = contextlib.nullcontext()  # around the next step of the optimizer

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        self.model.eval()
        self.loss(step, 0)
        self.model.train()

    def path(self, folder: Path, name: str) -> Path:
        return folder / f"tp-{self.tp}" / name

    def save(self, folder: Path, step: int, **how: Any) -> None:
        path = self.path(folder, f"step-{step}")
        self.saving = lowtide.save(
            path,
            self.model,
            self.optimizer,
            {"step": step},
            keep=1,
            process_group=self.group,
            **how,
        )

    saving: Any = None  # in the background

    def settle(self) -> None:
        """Nothing is on its way; gloo's threads have let go of what they sent."""
        if self.saving is not None:
            self.saving.wait()
        dist.barrier()
        time.sleep(0.02)

    def load(self, folder: Path, step: int) -> None:
        path = self.path(folder, f"step-{step}")
        with warnings.catch_warnings():
            # Of another number of ranks there are no generators.
            warnings.filterwarnings("ignore", "lowtide: load")
            extra = lowtide.load(
                path, self.model, self.optimizer, process_group=self.group
            )
        assert extra == {"step": step}

    def digest(self) -> str:
        """Of this rank's parts of parameters and optimizer states."""
        found = hashlib.sha256()
        for p in self.optimizer.param_groups[0]["params"]:
            state = self.optimizer.state[p]
            for value in (p, *(state[key] for key in sorted(state))):
                found.update(value.detach().numpy().tobytes())
        return found.hexdigest()


def gathers_again(step: int) -> Any:
    """Every second step saves what sequence parallelism gathered."""
    if step % 2:
        return contextlib.nullcontext()
    return lowtide.sequence_parallel.gather_policy(regather=["ffn_in"], min_bytes=0)


# -- what happens to it ----------------------------------------------------------------


def boom() -> None:
    raise Boom("here")


def no_memory(category: str, name: str) -> Callable[[Training], None]:
    memory = device_memory(torch.device("cpu"))
    return lambda training: memory.fail_next_lease(category, name)


def at(place: str, how: Callable[[], None]) -> Callable[[Training], None]:
    return lambda training: training.at.update({place: how})


def in_optimizer(training: Training) -> None:
    training.breaking = BreaksAt(9)


EVERYWHERE: dict[str, Callable[[Training], None]] = {
    "exception before a forward": at("data", boom),
    "exception in a forward": at("forward", boom),
    "exception in a backward": at("backward", boom),
    "exception in a recomputation": at("recomputation", boom),
    "interrupt in a forward": at("forward", interrupt),
    "interrupt in a backward": at("backward", interrupt),
    "no memory for parameters": no_memory("gathered", "second"),
    "no memory for an offloaded value": no_memory("activations", "input"),
}
# On the last rank, when it is in no collective that others wait for.
ALONE: dict[str, Callable[[Training], None]] = {
    "exception between gradients and optimizer": at("gradients", boom),
    "exception in the optimizer": in_optimizer,
    "exception behind the optimizer": at("behind the optimizer", boom),
}
FAULTS = EVERYWHERE | ALONE
RAISED = (Boom, KeyboardInterrupt, torch.OutOfMemoryError, StepUndone)
BARE = 2  # every so many-th fault of all ranks is caught without a block


def fault_of(step: int) -> str | None:
    return [*FAULTS][step // 4 % len(FAULTS)] if step % 4 == 1 else None


def fail(training: Training, step: int, microbatches: int, name: str) -> None:
    if name in EVERYWHERE or dist.get_rank() == dist.get_world_size() - 1:
        FAULTS[name](training)
    block: Any = lowtide.step(training.model, training.optimizer)
    if name in EVERYWHERE and step // 4 % BARE:
        block = contextlib.nullcontext()
    try:
        with block:
            training.step(step, microbatches)
    except RAISED:
        training.at.clear()
        training.breaking = contextlib.nullcontext()
        training.optimizer.zero_grad()
        return
    raise AssertionError(f"{name}: expected to raise")


LEAKS = {  # what grows by each, and by how much a step
    "tensor": ("resident", 8192),
    "descriptor": ("descriptors", 1),
    "thread": ("threads", 1),
    "slot of the pinned pool": ("pinned", 1024),
    "gradient": ("ledger", 24576),
}


class Leak:
    """Keeps something of every step, as a program with a mistake would."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.kept: list[Any] = []
        self.end = threading.Event()

    def after(self, training: Training, step: int) -> None:
        if self.kind == "tensor":
            self.kept.append(torch.ones(2048))
        elif self.kind == "descriptor":
            self.kept.append(os.dup(0))
        elif self.kind == "thread":
            self.kept.append(threading.Thread(target=self.end.wait, daemon=True))
            self.kept[-1].start()
        elif self.kind == "slot of the pinned pool":  # of a graph without backward
            self.kept.append(training.loss(step, 0))
        elif self.kind == "gradient":
            training.loss(step, 0).backward()
            self.kept.append([p.grad for p in training.model.parameters()])
            training.optimizer.zero_grad()

    def close(self) -> None:
        self.end.set()
        if self.kind == "descriptor":
            for descriptor in self.kept:
                os.close(descriptor)


# -- a rank ----------------------------------------------------------------------------


class Worlds:
    """Process groups of this process, one after another, over one store of rank 0's."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.count = 0
        where = dist.FileStore(os.environ["RANK_POOL_STORE"], RANKS)
        port = 0 if self.rank == 0 else int(where.get("port"))
        self.store = dist.TCPStore(
            "localhost", port, is_master=self.rank == 0, wait_for_workers=False
        )
        if self.rank == 0:
            where.set("port", str(self.store.port))

    def enter(self, layout: str) -> Training | None:
        """None: this rank is not in it, and has waited until the others left."""
        self.count += 1
        replicas, shards = LAYOUTS[layout]
        size = replicas * shards * AXIS
        if self.rank >= size:
            self.store.wait([f"left {self.count}"], MINUTES)
            return None
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"world {self.count}", self.store),
            rank=self.rank,
            world_size=size,
            timeout=MINUTES,
        )
        return Training(layout)

    def leave(self, training: Training) -> None:
        dist.barrier()
        # torch 2.10 and 2.11 never let go of the meshes that DTensor's operators met
        # (pytorch issue 181761), nor these of their groups, which have threads.
        training.mesh._pg_registry.clear()
        training.__dict__.clear()
        _clear_sharding_prop_cache()
        gc.collect()
        dist.destroy_process_group()
        if self.rank == 0:
            self.store.set(f"left {self.count}", "")


def soak(plan: Plan, folder: str) -> dict[str, Any]:
    """On each of RANKS processes without a process group: what it held and the bits it
    had at the end of every cycle, and how often what happened."""
    torch.set_num_threads(1)
    # A program that was started in the background ignores interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    worlds, leak, samples, digests = Worlds(), Leak(plan.leak), [], []
    happened: Counter[str] = Counter()
    for layout, group in itertools.groupby(range(plan.steps), plan.layout):
        steps = [*group]
        training = worlds.enter(layout)
        happened[f"world of {layout}"] += 1
        if training is None:
            continue
        if steps[0] > 0:
            training.load(Path(folder), steps[0])
        for step in steps:
            happened.update(one_step(plan, training, step, Path(folder)))
            leak.after(training, step)
            if (step + 1) % plan.cycle == 0:
                training.settle()
                samples.append(sample())
                digests.append(training.digest())
        if steps[-1] + 1 < plan.steps:
            training.save(Path(folder), steps[-1] + 1)
        worlds.leave(training)
    leak.close()
    return {"samples": samples, "digests": digests, "happened": dict(happened)}


def one_step(plan: Plan, training: Training, step: int, folder: Path) -> Iterator[str]:
    """What happened in it."""
    microbatches = plan.microbatches(step)
    if not plan.disturbed:
        training.step(step, microbatches)
        return
    if (name := fault_of(step)) is not None:
        fail(training, step, microbatches, name)
        yield name
    block: Any = lowtide.step(training.model, training.optimizer)
    with block if step % 3 else contextlib.nullcontext():
        training.step(step, microbatches)
    if step % 10 == 4:
        training.evaluate(step)
        yield "evaluation"
    if step % 10 == 9:
        training.save(folder, step + 1, in_background=step % 20 == 9)
        yield "save"
