"""A large embedding takes the indices that ``nn.Embedding`` takes, whatever their shape
and dtype and however they differ between ranks: the bits of FSDP2."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._sharding import embedding
from lowtide._sharding.unit import unit_state
from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system

ROWS, DIM = 37, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, DIM, padding_idx=3)
        self.out = nn.Linear(DIM, 3)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(indices))


def indices(kind: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    some = torch.randint(ROWS, (3, 5), generator=generator)
    return {
        "int64": some,
        "int32": some.int(),
        "three dimensions": some[:, None],
        "transposed": some.t(),
        "scalar": some[0, 0],
        "int32 scalar": some[0, 0].int(),
        "empty": some[:, :0],
        "int32 empty": some[:0].int(),
        "empty on one rank": some[dist.get_rank() :][:1, : 3 * dist.get_rank()],
    }[kind]


KINDS = (
    *("int64", "int32", "three dimensions", "transposed", "scalar"),
    *("int32 scalar", "empty", "int32 empty", "empty on one rank"),
)


def trained(
    how: str, kind: str, of: type[nn.Embedding] | None = None
) -> tuple[Record, bool]:
    system = get_system("fsdp2" if how == "fsdp2" else "lowtide")
    settings = {} if how == "fsdp2" else {"grads": how}
    large = mock.patch.object(embedding, "LARGE_TABLE", 0)
    # Read some five rows of every rank at a time.
    with large, mock.patch.object(embedding, "LOOKUP_BYTES", 10 * 4 * DIM):
        torch.manual_seed(0)
        net: Any = Net()
        if of is not None:
            net.embed = of(ROWS, DIM, padding_idx=3)
        system.fully_shard(net.embed, **settings)
        system.fully_shard(net)
        record = Recorder()
        for step in range(3):
            net.set_requires_gradient_sync(step != 1)
            output = net(indices(kind, step))
            output.square().sum().backward()
            record.add("output", output)
            record.add_model(net)
    state = unit_state(net.embed)
    return record.values, state is not None and state.embedding_rows is not None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("grads", ["exact", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_indices_of_a_large_embedding(pool_of, kind, grads, ranks):
    theirs = pool_of(ranks).run(trained, "fsdp2", kind)
    ours = pool_of(ranks).run(trained, grads, kind)
    for (mine, in_rows), (other, _) in zip(ours, theirs, strict=True):
        assert in_rows
        assert_same_records(mine, other)


def refused() -> list[torch.dtype]:
    dtypes = []
    with mock.patch.object(embedding, "LARGE_TABLE", 0):
        net: Any = Net()
        for unit in (net.embed, net):
            lowtide.fully_shard(unit)
        for dtype in (torch.float32, torch.int16, torch.uint8, torch.bool):
            try:
                net(torch.ones((2, 3), dtype=dtype))
            except (RuntimeError, IndexError):
                dtypes.append(dtype)
        assert net.embed._get_fsdp_state().embedding_rows is not None
    return dtypes


def test_indices_of_other_dtypes_raise_as_ever(pool_of):
    for dtypes in pool_of(2).run(refused):
        assert dtypes == [torch.float32, torch.int16, torch.uint8, torch.bool]


# -- a class of the program's own -----------------------------------------------------


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 3


class Buffered(nn.Embedding):
    """As Gemma's of transformers."""

    def __init__(self, *sizes: int, padding_idx: int | None = None) -> None:
        super().__init__(*sizes, padding_idx=padding_idx)
        self.register_buffer("scale", torch.tensor(0.3), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * self.scale.to(self.weight.dtype)


class Masked(nn.Embedding):
    """As torchtitan's over parallel ranks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else None
        mask = input < self.num_embeddings - 5
        out = nn.functional.embedding(
            input.clamp(0, self.num_embeddings - 6),
            self.weight if weight is None else weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
        return out * mask.unsqueeze(-1).to(out.dtype)


class Saving(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input, self.weight.square())


class Twice(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + super().forward(input.flip(0))


class Sliced(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.weight[1]


class OfTwoInputs(nn.Embedding):
    def forward(self, input: torch.Tensor, more: float = 2.0) -> torch.Tensor:
        return super().forward(input) * more


class Checkpointed(nn.Embedding):
    """Computes its lookup again in backward, outside of its forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        looked_up: torch.Tensor = checkpoint(
            lambda rows: super(Checkpointed, self).forward(rows).exp(),
            input,
            use_reentrant=False,
        )
        return looked_up.square()


# Whether they are looked up in blocks.
LARGE_CLASSES = {
    Checkpointed: False,
    Scaled: True,
    Buffered: True,
    Masked: True,
    OfTwoInputs: True,
    Saving: False,
    Twice: True,
    Sliced: False,
}


@pytest.mark.parametrize("grads", ["exact", "fused"])
@pytest.mark.parametrize("of", LARGE_CLASSES)
def test_a_large_table_of_a_class_of_the_programs_own(pool_of, of, grads):
    if grads == "fused" and of is Twice:
        pytest.skip("the sum of several lookups has another order")
    theirs = pool_of(2).run(trained, "fsdp2", "int64", of)
    ours = pool_of(2).run(trained, grads, "int64", of)
    for (mine, in_rows), (other, _) in zip(ours, theirs, strict=True):
        assert in_rows == LARGE_CLASSES[of]
        assert_same_records(mine, other)


class Changing(nn.Embedding):
    doubled = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (self.weight.sum() if self.doubled else 1)


def used_otherwise() -> str:
    with mock.patch.object(embedding, "LARGE_TABLE", 0):
        net: Any = Net()
        net.embed = Changing(ROWS, DIM)
        for unit in (net.embed, net):
            lowtide.fully_shard(unit)
        net(indices("int64", 0)).sum().backward()
        net.embed.doubled = True
        with pytest.raises(NotImplementedError) as error:
            net(indices("int64", 0))
    return str(error.value)


def test_another_use_of_its_table_is_refused(pool_of):
    for text in pool_of(2).run(used_otherwise):
        assert text.startswith(
            "lowtide: Changing: expected a forward that only looks its table up, as "
            "when it was tried, got "
        )


# Gathers of a step: embedding and head in forward, the head in backward.
CLASSES = {Scaled: 3, Saving: 4, Checkpointed: 4}


def gathers_so_far(net: Any) -> int:
    state = unit_state(net.embed)
    return 0 if state is None else state.groups.gather.counters["all-gather"][0]


def trained_of_class(name: str, kind: type[nn.Embedding]) -> tuple[Record, int]:
    system, record = get_system(name), Recorder()
    torch.manual_seed(0)
    net: Any = Net()
    net.embed = kind(ROWS, DIM)
    for module in (net.embed, net.out, net):
        system.fully_shard(module)
    before = gathers_so_far(net)
    for step in range(3):
        net(indices("int64", step)).square().mean().backward()
        record.add_model(net)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
        net.zero_grad()
    return record.values, gathers_so_far(net) - before


@pytest.mark.parametrize("kind", CLASSES)
def test_a_table_that_backward_does_not_read_is_not_gathered_for_it(pool_of, kind):
    ours = pool_of(2).run(trained_of_class, "lowtide", kind)
    theirs = pool_of(2).run(trained_of_class, "fsdp2", kind)
    for (mine, gathers), (other, _) in zip(ours, theirs, strict=True):
        assert_same_records(mine, other)
        assert gathers == 3 * CLASSES[kind]


def gemma() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **{"vocab_size": ROWS, "hidden_size": 16, "intermediate_size": 24},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4},
        **{"num_key_value_heads": 2, "tie_word_embeddings": False, "use_cache": False},
        **{"sliding_window": 4, "pad_token_id": 3},
    )
    return Gemma3ForCausalLM(config).train()


def gemma_trained(name: str) -> tuple[Record, bool]:
    """In bf16, clipped, with microbatches without sync; under lowtide with offloaded
    inputs, too."""
    system, record, model = get_system(name), Recorder(), gemma()
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with mock.patch.object(embedding, "LARGE_TABLE", 0):
        for block in model.model.layers:
            if name == "lowtide":
                offload = lowtide.ActivationPolicy(offload=["input"])
                lowtide.checkpoint(block, offload)
            system.fully_shard(block, mp_policy=policy)
        system.fully_shard(model.model.embed_tokens, mp_policy=policy)
        system.fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for step in range(3):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                ids = indices("int64", 10 * step + micro)
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                record.add("loss", loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            record.add_model(model)
            optimizer.zero_grad()
    state = unit_state(model.model.embed_tokens)
    return record.values, state is not None and state.embedding_rows is not None


def test_gemmas_scaled_embedding_comes_in_blocks(pool_of):
    theirs = pool_of(2).run(gemma_trained, "fsdp2")
    ours = pool_of(2).run(gemma_trained, "lowtide")
    for (mine, in_rows), (other, _) in zip(ours, theirs, strict=True):
        assert in_rows
        assert_same_records(mine, other)
