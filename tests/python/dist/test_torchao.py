"""torchao's own tensors as parameters of sharded models: what they send is what is
gathered, and training has the bits of FSDP2, or of one process where FSDP2 cannot."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

import lowtide
from lowtide._sharding.unit import unit_state
from support.quantized import (
    DIM,
    MODELS,
    SETTINGS,
    float8,
    loss_of,
    optimizer_of,
    wrap,
)
from support.recorder import (
    Record,
    Recorder,
    assert_same_records,
    assert_trains_as_fsdp2,
)
from support.reference import average

STEPS = 3


def train(system_name: str, kind: str) -> Record:
    model = wrap(system_name, MODELS[kind](), **SETTINGS.get(kind, {}))
    optimizer = optimizer_of(model)
    record = Recorder()
    for step in range(STEPS):
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        record.add("loss", loss)
        for name, p in model.named_parameters():
            if p.grad is not None:
                record.add(name, p.grad.full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    return record.values


@pytest.mark.parametrize("kind", ["bitnet", "int8", "nf4", "mxfp8"])
def test_training_equals_fsdp2(pool_of, kind):
    pool = pool_of(2)
    assert_trains_as_fsdp2(pool, train, kind)


def train_by_rule(num_ranks: int) -> list[Record]:
    """Every rank's batch through one model; by rank."""
    model = float8()
    optimizer = optimizer_of(model)
    records = [Recorder() for _ in range(num_ranks)]
    for step in range(STEPS):
        by_rank = []
        for rank, record in enumerate(records):
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            record.add("loss", loss)
            by_rank.append([p.grad for p in model.parameters()])
        for (name, p), *grads in zip(model.named_parameters(), *by_rank, strict=True):
            p.grad = average(grads)
            for record in records:
                record.add(name, p.grad)
        optimizer.step()
    return [record.values for record in records]


def test_float8_gathers_equal_one_process(pool_of):
    # gloo gathers no float8 tensors, so FSDP2 raises here; lowtide sends bytes.
    expected = pool_of(1).run(train_by_rule, 2)[0]
    for mine, other in zip(
        pool_of(2).run(train, "lowtide", "float8"), expected, strict=True
    ):
        assert_same_records(mine, other)


def with_scales_in_advance() -> tuple[list[float], dict[str, int], str]:
    """torchao computes all scales in one collective behind the optimizer's step."""
    model = wrap("lowtide", float8())
    optimizer = optimizer_of(model)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
    state = unit_state(model[0])
    assert state is not None
    lowtide.memory_report(model, reset_peaks=True)
    state.groups.gather.reset_counters()
    with torch.no_grad():
        model(torch.ones(1, DIM))
    gathered = lowtide.memory_report(model).categories["gathered"]
    return (
        losses,
        {
            "wire": state.groups.gather.counters["all-gather"][1],
            "gathered": gathered.peak,
        },
        type(model[0][0].weight.to_local()).__name__,
    )


def test_float8_is_a_byte_a_parameter(pool_of):
    losses = [
        [value.item() for name, value in record if name == "loss"]
        for record in pool_of(2).run(train, "lowtide", "float8")
    ]
    for mine, (found, num_bytes, kind) in zip(
        losses, pool_of(2).run(with_scales_in_advance), strict=True
    ):
        assert found == pytest.approx(mine, rel=1e-2)
        assert kind == "WeightWithDynamicFloat8CastTensor"
        # Three matrices, of which a rank sends its half; two of them live at once.
        assert num_bytes == {"wire": 3 * DIM * DIM // 2, "gathered": 2 * DIM * DIM}
