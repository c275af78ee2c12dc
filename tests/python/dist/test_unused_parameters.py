"""Parameters that a rank leaves out: experts without tokens, modalities that a batch
does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide._torch_version import VERSION
from support.bits import same_bits
from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system

WIDTH, EXPERTS, STEPS = 5, 4, 3


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return x + torch.tanh(self.experts[chosen](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for block, expert in zip(self.blocks, chosen, strict=True):
            x = block(x, expert)
        return x


def sharded(system: str, replicas: int) -> Any:
    torch.manual_seed(0)
    model: Any = Model()
    of = get_system(system)
    shape = (replicas, dist.get_world_size() // replicas)
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh = mesh if replicas > 1 else mesh["shard"]
    for block in model.blocks:
        of.fully_shard(block, mesh=mesh)
    return of.fully_shard(model, mesh=mesh)


def chosen_by(rank: int, step: int) -> list[int]:
    """Ranks differ; nobody chooses the last expert of any block."""
    return [(rank + step) % (EXPERTS - 1), rank % 2]


def gradients(
    system: str, replicas: int, *, as_zeros: bool, hooked: bool = False
) -> list[Any]:
    """Full gradients of each step by name, None where there is none; `hooked`: with
    hooks that want them inside the backward."""
    model = sharded(system, replicas)
    if as_zeros:
        model.set_reduce_scatter_unused_params(True)
    if hooked:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    rank = dist.get_rank()
    found = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(3, WIDTH), chosen_by(rank, step)).square().sum().backward()
        found.append(
            {
                name: None if p.grad is None else p.grad.full_tensor().clone()
                for name, p in model.named_parameters()
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    return found


def is_chosen(name: str, step: int, world_size: int) -> bool:
    block, expert = int(name.split(".")[1]), int(name.split(".")[3])
    return any(chosen_by(rank, step)[block] == expert for rank in range(world_size))


LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 2)]


@pytest.mark.parametrize("hooked", [False, True], ids=("plain", "hooked"))
@pytest.mark.parametrize(("num_ranks", "replicas"), LAYOUTS)
def test_without_the_setting_what_nobody_used_has_none(
    pool_of, num_ranks, replicas, hooked
):
    pool = pool_of(num_ranks)
    for found in pool.run(
        gradients, "lowtide", replicas, as_zeros=False, hooked=hooked
    ):
        for step, by_name in enumerate(found):
            for name, gradient in by_name.items():
                used = is_chosen(name, step, num_ranks)
                assert (gradient is not None) == used, (step, name)


@pytest.mark.parametrize(("num_ranks", "replicas"), LAYOUTS)
def test_with_it_all_have_one_and_others_keep_their_bits(pool_of, num_ranks, replicas):
    pool = pool_of(num_ranks)
    (with_none, *_) = pool.run(gradients, "lowtide", replicas, as_zeros=False)
    for found in pool.run(gradients, "lowtide", replicas, as_zeros=True):
        for name, gradient in found[0].items():
            if with_none[0][name] is None:
                assert same_bits(gradient, torch.zeros_like(gradient)), name
            else:
                assert torch.equal(gradient, with_none[0][name]), name
        assert all(g is not None for by_name in found for g in by_name.values())


@pytest.mark.skipif(VERSION < (2, 13), reason="FSDP2 has it from torch 2.13 on")
@pytest.mark.parametrize(("num_ranks", "replicas"), LAYOUTS)
def test_it_has_the_bits_of_fsdp2(pool_of, num_ranks, replicas):
    pool = pool_of(num_ranks)
    theirs = pool.run(gradients, "fsdp2", replicas, as_zeros=True)
    ours = pool.run(gradients, "lowtide", replicas, as_zeros=True)
    for mine, other in zip(ours, theirs, strict=True):
        for step, by_name in enumerate(mine):
            for name, gradient in by_name.items():
                assert same_bits(gradient, other[step][name]), (step, name)


class WithSide(nn.Module):
    """Experts that are on a mesh of their own, and a layer that some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, expert: int, *, side: bool) -> torch.Tensor:
        x = self.experts(x, expert)
        return x + self.side(x) if side else x


def of_two_meshes(*, as_zeros: bool) -> list[dict[str, torch.Tensor | None]]:
    """This rank's shards of gradients by step. Ranks with the same experts are two
    apart."""
    rank = dist.get_rank()
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same", "parts"))
    placed = lowtide.ShardPlacementResult(None, both["same"])
    torch.manual_seed(0)
    model: Any = nn.ModuleList(WithSide() for _ in range(2))
    of_experts = {p for block in model for p in block.experts.parameters()}
    for block in model:
        lowtide.fully_shard(
            block, shard_placement_fn=lambda p: placed if p in of_experts else None
        )
        block.set_reduce_scatter_unused_params(as_zeros)
    found = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(3, WIDTH)
        for block in model:
            x = block(x, (rank // 2 + step * rank) % EXPERTS, side=rank == step)
        x.square().sum().backward()
        found.append(
            {
                name: None if p.grad is None else p.grad.to_local().clone()
                for name, p in model.named_parameters()
            }
        )
        model.zero_grad()
    return found


def test_ranks_of_each_mesh_tell_each_other(pool_of):
    pool = pool_of(4)
    alike = pool.run(of_two_meshes, as_zeros=True)
    for rank, found in enumerate(pool.run(of_two_meshes, as_zeros=False)):
        for step, by_name in enumerate(found):
            same = (rank % 2, rank % 2 + 2)
            chosen = {(other // 2 + step * other) % EXPERTS for other in same}
            for name, gradient in by_name.items():
                expert = int(name.split(".")[3]) if "experts" in name else None
                used = expert is None or expert in chosen
                assert (gradient is not None) == used, (rank, step, name)
                if gradient is not None:
                    assert torch.equal(gradient, alike[rank][step][name])


def switch_transformers() -> Any:
    from transformers import (
        SwitchTransformersConfig,
        SwitchTransformersForConditionalGeneration,
    )

    torch.manual_seed(0)
    config = SwitchTransformersConfig(
        **{"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4},
        **{"num_layers": 2, "num_decoder_layers": 2, "num_experts": 8},
        **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        **{"dropout_rate": 0.0, "router_jitter_noise": 0.0, "use_cache": False},
        **{"router_dtype": "bfloat16", "decoder_start_token_id": 0},
    )
    return SwitchTransformersForConditionalGeneration(config).train()


def translations(
    system_name: str, *, as_zeros: bool, microbatches: int
) -> tuple[Record, list[list[str]]]:
    """Of four steps; the parameters that have no gradient in each."""
    system = get_system(system_name)
    model = switch_transformers()
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in [*model.encoder.block, *model.decoder.block]:
        if system_name == "lowtide":
            lowtide.checkpoint(block, lowtide.ActivationPolicy(offload=["input"]))
        system.fully_shard(block, mp_policy=policy)
    system.fully_shard(model, mp_policy=policy)
    if as_zeros:
        model.set_reduce_scatter_unused_params(True)
    # Of those without a gradient zeros change nothing.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record, without = Recorder(), []
    for step in range(4):
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
            torch.manual_seed(100 * step + 10 * microbatch + dist.get_rank())
            ids = torch.randint(0, 32, (1, 5))
            loss = model(input_ids=ids, labels=ids.roll(1, 1)).loss
            loss.backward()
            record.add("loss", loss)
        without.append([n for n, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()
        record.add_model(model)
    return record.values, without


# FSDP2 of 2.13 refuses zeros in bf16 beside fp32 that microbatches left.
@pytest.mark.parametrize(
    "beside", ["lowtide", *(["fsdp2"] if VERSION >= (2, 15) else [])]
)
def test_experts_of_switch_transformers(pool_of, beside):
    """They are modules that are not called without tokens: the same bits as with zeros
    for those that nobody used. Their routers convert themselves in every forward, and
    so round what FSDP2 has accumulated without sync."""
    pool = pool_of(2)
    few = 2 if beside == "lowtide" else 1
    theirs = pool.run(translations, beside, as_zeros=True, microbatches=few)
    ours = pool.run(translations, "lowtide", as_zeros=False, microbatches=few)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_records(mine[0], other[0])
        assert all(mine[1])
        assert other[1] == [[]] * 4


def reset_after_a_failure(_: str) -> tuple[str, bool]:
    model = sharded("lowtide", 1)
    model.reset_iter_state()  # nothing has run
    model(torch.ones(1, WIDTH), [0, 0])
    with pytest.raises(RuntimeError) as raised:
        model.blocks[0].reset_iter_state()
    model(torch.ones(1, WIDTH), [0, 0]).sum().backward()
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, WIDTH), [0, 0]).sum().backward()
    model.reset_iter_state()  # what waits for a reduction is dropped
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, WIDTH), [1, 1]).sum().backward()
    dropped = model.blocks[0].experts[0].weight.grad is None
    return str(raised.value), dropped


def test_reset_iter_state_is_the_roots(pool_of):
    for text, dropped in pool_of(2).run(reset_after_a_failure, ""):
        assert text == (
            "lowtide: reset_iter_state: expected the root, got the unit 'blocks.0' "
            "inside it. Call it on the module that is called first."
        )
        assert dropped


def test_reductions_have_a_group_of_their_own(pool_of):
    for text in pool_of(2).run(separate_groups):
        assert text == (
            "lowtide: set_separate_reduce_scatter_group: expected what "
            "LOWTIDE_COMMUNICATORS says, True, got False. Set it to separate or shared "
            "before the program starts, for all units."
        )


def separate_groups() -> str:
    model: Any = lowtide.fully_shard(nn.Linear(4, 4))
    model.set_separate_reduce_scatter_group()
    with pytest.raises(NotImplementedError) as raised:
        model.set_separate_reduce_scatter_group(False)
    return str(raised.value)
