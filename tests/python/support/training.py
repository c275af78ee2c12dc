"""One training run, described by `Run` and recorded in a `Trace`.

`train_sharded` runs on every rank of a pool under a named system; the same run
by the single-process rule is `reference.train_by_rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from support.model import Llama, ModelConfig, batch, build, loss_fn
from support.systems import System, get_system

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}

# Which calls of fully_shard: every block, then the root; the root alone; lists
# of modules, with a root that holds no parameter; or embedding and head as
# units of their own.
WRAPPINGS = ("blocks", "root", "lists", "own_units")


@dataclass(frozen=True)
class Run:
    model: ModelConfig = ModelConfig()
    world_size: int = 1
    param_dtype: torch.dtype | None = torch.bfloat16
    reduce_dtype: torch.dtype | None = torch.float32
    microbatches: int = 1
    sync: str = "each"  # gradients reduced after "each" microbatch or the "last"
    wrapping: str = "blocks"
    reshard_after_forward: bool | None = None
    num_steps: int = 5
    clip: float | None = None
    adamw: tuple[tuple[str, Any], ...] = (("foreach", False),)

    def __str__(self) -> str:
        def short(dtype: torch.dtype | None) -> str:
            return str(dtype).removeprefix("torch.")

        parts = [
            f"{self.world_size}ranks",
            f"{short(self.param_dtype)}-{short(self.reduce_dtype)}",
            f"{self.microbatches}x{self.sync}",
            self.wrapping,
            f"reshard{self.reshard_after_forward}",
        ]
        return "-".join(parts)


@dataclass
class Trace:
    """`grads` and `params` hold one dict per step: after the last backward of
    the step and after the optimizer.  On ranks: that rank's shard."""

    losses: list[list[float]] = field(default_factory=list)  # [step][microbatch]
    grads: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    params: list[dict[str, torch.Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def shard(model: Llama, run: Run, system: System, **settings: Any) -> Llama:
    policy = system.MixedPrecisionPolicy(
        param_dtype=run.param_dtype, reduce_dtype=run.reduce_dtype
    )
    settings = {
        "mp_policy": policy,
        "reshard_after_forward": run.reshard_after_forward,
    } | settings
    for unit in units(model, run.wrapping):
        system.fully_shard(unit, **settings)
    system.prepare(model)
    return model


def units(model: Llama, wrapping: str) -> Iterator[nn.Module | list[nn.Module]]:
    if wrapping == "lists":
        yield [model.embed, model.layers[0]]
        yield from model.layers[1:]
        tail: list[nn.Module] = [model.norm, model.head]
        yield tail
    elif wrapping == "own_units":
        yield model.embed
        yield model.head
        yield from model.layers
    elif wrapping == "blocks":
        yield from model.layers
    else:
        assert wrapping == "root"
    yield model


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_params(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(p).clone() for name, p in model.named_parameters()}


def local_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else local(p.grad).clone()
        for name, p in model.named_parameters()
    }


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, **(ADAMW | settings))


# Called with the model and whether the microbatch is the step's last.
BeforeMicrobatch = Callable[[Any, bool], None]


def accumulate(
    model: Any,
    run: Run,
    step: int,
    rank: int,
    before: BeforeMicrobatch | None = None,
) -> list[float]:
    """Forward and backward of one step's microbatches; returns their losses."""
    losses = []
    for microbatch in range(run.microbatches):
        last = microbatch == run.microbatches - 1
        if run.sync == "last":
            model.set_requires_gradient_sync(last)
        if before is not None:
            before(model, last)
        inputs, targets = batch(run.model, step, microbatch, rank)
        loss = loss_fn(model(inputs), targets) / run.microbatches
        loss.backward()
        losses.append(loss.item())
    return losses


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    run: Run,
    step: int,
    trace: Trace,
    before: BeforeMicrobatch | None = None,
) -> None:
    trace.losses.append(accumulate(model, run, step, dist.get_rank(), before))
    trace.grads.append(local_grads(model))
    if run.clip is not None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        assert isinstance(norm, DTensor)
        trace.norms.append(norm.full_tensor().item())
    optimizer.step()
    optimizer.zero_grad()
    trace.params.append(local_params(model))


def train_sharded(system_name: str, run: Run) -> Trace:
    system = get_system(system_name)
    model = shard(build(run.model), run, system)
    optimizer = adamw(model, **dict(run.adamw))
    trace = Trace()
    for step in range(run.num_steps):
        train_step(model, optimizer, run, step, trace)
    return trace


def stitch(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The full tensor from every rank's rows."""
    return torch.cat(list(shards))


def gathered(traces: Sequence[Trace], what: Callable[[Trace], Any]) -> Any:
    """Full tensors by step and name from the traces of all ranks."""
    by_rank = [what(trace) for trace in traces]
    return [
        {
            name: None
            if steps[0][name] is None
            else stitch([shard[name] for shard in steps])
            for name in steps[0]
        }
        for steps in zip(*by_rank, strict=True)
    ]
