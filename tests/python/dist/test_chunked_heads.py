"""A loss that runs the head over chunks of tokens, each with a backward of its own
inside of the forward, as torchtitan's from 0.3 on: the bits of FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lowtide._sharding.groups import groups_of
from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system

DIM, WORDS, CHUNKS, STEPS = 16, 32, 4, 3


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Without the head."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x)


class _Known(torch.autograd.Function):
    """A loss whose gradient is there already."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, gradient: Any, loss: Any) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.saved_tensors[0], None, None


def chunked_loss(head: Any, hidden: Any, labels: torch.Tensor) -> torch.Tensor:
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    total, gradients = torch.zeros(()), []
    parts = zip(hidden.chunk(CHUNKS, 1), labels.chunk(CHUNKS, 1), strict=True)
    for number, (part, words) in enumerate(parts):
        if number == CHUNKS - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        part = part.detach().requires_grad_(hidden.requires_grad)
        logits = head(part).float().flatten(0, 1)
        loss = F.cross_entropy(logits, words.flatten(), reduction="sum")
        total = total + loss.detach()
        if hidden.requires_grad:
            loss.backward()
            gradients.append(part.grad)
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.set_requires_gradient_sync(True, recurse=False)
    head.reshard()
    if not hidden.requires_grad:
        return total
    return _Known.apply(hidden, torch.cat(gradients, 1), total)


def other_mesh(ranks: int) -> DeviceMesh:
    first = dist.get_rank() // ranks * ranks
    group = dist.new_group(
        list(range(first, first + ranks)), use_local_synchronization=True
    )
    return DeviceMesh.from_group(group, "cpu")


def train(
    system_name: str, grouped: bool, late: bool, apart: int = 0
) -> tuple[Record, int]:
    """``grouped``: norm and head are one unit, of which the head runs alone; ``late``:
    layers reduce the gradients of a step's first microbatch with those of the second;
    ``apart``: the first layer is on a mesh of its own, of so many ranks. What is
    returned behind the record is how often lowtide reduced over that one."""
    system = get_system(system_name)
    torch.manual_seed(0)
    model: Any = Decoder()
    policy = MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, cast_forward_inputs=False
    )
    last: Any = [model.norm, model.head] if grouped else model.head
    for unit in (model.embedding, last, *model.layers, model):
        settings: dict[str, Any] = {}
        if apart and unit is model.layers[0]:
            settings["mesh"] = mesh = other_mesh(apart)
        system.fully_shard(unit, mp_policy=policy, **settings)
    for module in model.modules():
        if isinstance(module, system.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    record = Recorder()
    for step in range(STEPS):
        for microbatch in range(2):
            seed = 100 * step + 10 * microbatch + dist.get_rank()
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, WORDS, (2, 9), generator=generator)
            model.set_requires_gradient_sync(microbatch == 1 or not late)
            loss = chunked_loss(model.head, model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            record.add("loss", loss)
        record.add_model(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss = chunked_loss(model.head, model(tokens[:, :-1]), tokens[:, 1:])
        record.add("validation", loss)
    calls = 0
    if apart and system_name == "lowtide":
        reduce = groups_of(mesh, torch.device("cpu")).reduce
        calls = reduce.counters["reduce-scatter"][0]
    return record.values, calls


@pytest.mark.parametrize(
    ("grouped", "late"), [(False, False), (True, False), (False, True)]
)
def test_training_equals_fsdp2(pool_of, grouped, late):
    pool = pool_of(2)
    for (mine, _), (other, _) in zip(
        pool.run(train, "lowtide", grouped, late),
        # Of a list of modules FSDP2 2.11 wants all to run; units change no bits.
        pool.run(train, "fsdp2", False, late),
        strict=True,
    ):
        assert_same_records(mine, other)


@pytest.mark.parametrize("apart", [1, 2])
def test_a_unit_on_another_mesh_does_not_leave_with_each_chunk(pool_of, apart):
    """Be it of one rank, as the experts of which each rank has others, or of the same
    ranks."""
    pool = pool_of(2)
    for (mine, calls), (other, _) in zip(
        pool.run(train, "lowtide", False, False, apart),
        pool.run(train, "fsdp2", False, False, apart),
        strict=True,
    ):
        assert_same_records(mine, other)
        assert calls == 2 * STEPS  # once a microbatch
