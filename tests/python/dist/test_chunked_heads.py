"""A loss that runs the head over chunks of tokens, each with a backward of its own
inside of the forward, as torchtitan's from 0.3 on: the bits of FSDP2."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lowtide._sharding.groups import groups_of
from support.meshes import strided_mesh
from support.ranks import RankPool
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


def chunked_loss(
    head: Any, hidden: Any, labels: torch.Tensor, wanted: bool = True
) -> torch.Tensor:
    """``wanted``: whether chunks want a gradient, where what they are of has one."""
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    total, gradients = torch.zeros(()), []
    parts = zip(hidden.chunk(CHUNKS, 1), labels.chunk(CHUNKS, 1), strict=True)
    for number, (part, words) in enumerate(parts):
        if number == CHUNKS - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        part = part.detach().requires_grad_(hidden.requires_grad and wanted)
        logits = head(part).float().flatten(0, 1)
        loss = F.cross_entropy(logits, words.flatten(), reduction="sum")
        total = total + loss.detach()
        if hidden.requires_grad:
            loss.backward()
            gradients.append(part.grad if wanted else torch.ones_like(part))
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.set_requires_gradient_sync(True, recurse=False)
    head.reshard()
    if not hidden.requires_grad:
        return total
    return _Known.apply(hidden, torch.cat(gradients, 1), total)


def train(
    system_name: str,
    grouped: bool,
    late: bool,
    apart: tuple[int, int] | None = None,
    rest: tuple[int, int] | None = None,
    unwanted: dict[int, tuple[int, ...]] | None = None,
) -> tuple[Record, list[int]]:
    """``grouped``: norm and head are one unit, of which the head runs alone; ``late``:
    layers reduce the gradients of a step's first microbatch with those of the second;
    ``apart``, ``rest``: the mesh of the first layer and that of everything else;
    ``unwanted``: by step, ranks on which chunks want no gradient. What is returned
    behind the record is how often lowtide reduced over the first layer's, by step."""
    system = get_system(system_name)
    torch.manual_seed(0)
    model: Any = Decoder()
    meshes = [strided_mesh(*of) if of is not None else None for of in (apart, rest)]
    policy = MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, cast_forward_inputs=False
    )
    last: Any = [model.norm, model.head] if grouped else model.head
    for unit in (model.embedding, last, *model.layers, model):
        mesh = meshes[0 if unit is model.layers[0] else 1]
        settings: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
        system.fully_shard(unit, mp_policy=policy, **settings)
    for module in model.modules():
        if isinstance(module, system.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    record = Recorder()
    calls = [0]
    for step in range(STEPS):
        wanted = dist.get_rank() not in (unwanted or {}).get(step, ())
        for microbatch in range(2):
            seed = 100 * step + 10 * microbatch + dist.get_rank()
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, WORDS, (2, 9), generator=generator)
            model.set_requires_gradient_sync(microbatch == 1 or not late)
            hidden = model(tokens[:, :-1])
            loss = chunked_loss(model.head, hidden, tokens[:, 1:], wanted)
            loss.backward()
            record.add("loss", loss)
        record.add_model(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss = chunked_loss(model.head, model(tokens[:, :-1]), tokens[:, 1:])
        record.add("validation", loss)
        if meshes[0] is not None and system_name == "lowtide":
            reduce = groups_of(meshes[0], torch.device("cpu")).reduce
            calls.append(reduce.counters["reduce-scatter"][0])
    return record.values, [now - then for then, now in itertools.pairwise(calls)]


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


# How many ranks, the mesh of the first layer, that of the rest.
MESHES: dict[str, tuple[int, tuple[int, int], tuple[int, int] | None]] = {
    "of one rank": (2, (1, 1), None),  # experts of which each rank has others
    "of the same ranks": (2, (2, 1), None),
    "of more ranks": (4, (4, 1), (2, 2)),  # more of tensor than of expert parallelism
    "of some of them and others": (4, (2, 1), (2, 2)),
}


@pytest.mark.parametrize("case", MESHES)
def test_a_unit_on_another_mesh_does_not_leave_with_each_chunk(pool_of, case):
    ranks, apart, rest = MESHES[case]
    pool = pool_of(ranks)
    for (mine, calls), (other, _) in zip(
        pool.run(train, "lowtide", False, False, apart, rest),
        pool.run(train, "fsdp2", False, False, apart, rest),
        strict=True,
    ):
        assert_same_records(mine, other)
        assert calls == [2] * STEPS  # once a microbatch


@pytest.mark.parametrize("case", ["of more ranks", "of some of them and others"])
@pytest.mark.parametrize("differing", [(3,), (1, 3)])
def test_all_units_leave_where_ranks_of_another_mesh_call_the_head_otherwise(
    pool_of, case, differing
):
    """The head's own ranks, 0 and 2, do not differ then."""
    ranks, apart, rest = MESHES[case]
    pool = pool_of(ranks)
    settings = (apart, rest, {1: differing})
    for (mine, calls), (other, _) in zip(
        pool.run(train, "lowtide", False, False, *settings),
        pool.run(train, "fsdp2", False, False, *settings),
        strict=True,
    ):
        assert_same_records(mine, other)
        assert calls == [2, 2 * (CHUNKS + 1), 2]


def test_all_units_leave_where_ranks_are_not_compared_and_the_head_is_alone():
    """On a mesh of one rank, where ranks call it otherwise."""
    settings = (False, False, (2, 1), (1, 1), {1: (1,)})
    off = {"LOWTIDE_COMPARE_RANKS": "off"}
    with RankPool(2, group_timeout=20.0, env=off) as pool:
        for (mine, calls), (other, _) in zip(
            pool.run(train, "lowtide", *settings),
            pool.run(train, "fsdp2", *settings),
            strict=True,
        ):
            assert_same_records(mine, other)
            assert calls == [2 * (CHUNKS + 1)] * STEPS
