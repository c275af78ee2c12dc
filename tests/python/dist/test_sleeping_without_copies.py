"""``lowtide.sleep(drop=...)``: what is given up has no copy, what is kept has its bits,
and who uses something before it is given anew is told its name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import lowtide
from lowtide import sleeping
from lowtide._base.memory import ledger
from lowtide.sleeping import host_pool
from support.bits import assert_same_tensors
from support.model import batch
from support.optimizers import OPTIMIZERS, everything
from support.saving import SMALL, backward, make

CPU = torch.device("cpu")
GIVEN_ANEW = r"expected one that was given anew, got .* has dropped"


def trained(name: str = "foreach") -> tuple[Any, torch.optim.Optimizer]:
    """With gradients and states."""
    torch.manual_seed(0)
    model, _ = make()
    model.register_buffer("table", torch.arange(4.0), persistent=False)
    optimizer = OPTIMIZERS[name](model)
    backward(model, 0)
    optimizer.step()
    return model, optimizer


# -- gradients ------------------------------------------------------------------------


def drop_gradients(name: str) -> None:
    def run(drops: bool) -> dict[str, Any]:
        model, optimizer = trained(name)
        for step in range(1, 3):
            if drops:
                lowtide.sleep(model, optimizer, drop=["gradients"])
                lowtide.wake(model, optimizer)
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        optimizer.zero_grad()
        if drops:
            lowtide.wake(model, optimizer)
            assert not sleeping._asleep and sleeping._guard is None
        return everything(model, optimizer)

    assert_same_tensors(run(True), run(False), "the end")


@pytest.mark.parametrize("name", ["foreach", "fused", "local parameters", "momentum"])
def test_gradients_that_nobody_wants_are_not_copied(pool_of, name):
    pool_of(2).run(drop_gradients, name)


def use_dropped_gradients() -> None:
    model, optimizer = trained()
    kept = {k: v for k, v in everything(model, optimizer).items() if ".grad" not in k}
    model.set_requires_gradient_sync(False)
    lowtide.sleep(model, optimizer, drop=["gradients"])
    lowtide.wake(model, optimizer)
    with pytest.raises(RuntimeError, match=r"a gradient that was dropped.*zero_grad"):
        optimizer.step()
    parameter = next(model.parameters())
    assert isinstance(parameter.grad, DTensor)
    with pytest.raises(RuntimeError, match=r"\.grad: " + GIVEN_ANEW):
        parameter.grad.to_local().sum()
    with pytest.raises(RuntimeError, match=GIVEN_ANEW):
        optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match=GIVEN_ANEW):
        lowtide.clip_grad_norm_(model.parameters(), 1.0)
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match=GIVEN_ANEW):
        backward(model, 1)  # adds to them
    lowtide.abort_step(model)
    optimizer.zero_grad()
    now = everything(model, optimizer)
    assert_same_tensors({k: now[k] for k in kept}, kept, "kept")
    backward(model, 1)
    optimizer.step()


def test_gradients_that_were_dropped_are_refused_by_name(pool_of):
    pool_of(2).run(use_dropped_gradients)


# -- parameters -----------------------------------------------------------------------


def refill_parameters(name: str) -> None:
    model, optimizer = trained(name)
    held, before = everything(model, optimizer), [*model.parameters()]
    saved = {n: v.clone() for n, v in model.state_dict().items()}
    inputs, _ = batch(SMALL, 1, 0, dist.get_rank())
    with torch.no_grad():
        logits = model(inputs)

    def load() -> None:
        assert torch.equal(model.table, torch.arange(4.0))
        model.load_state_dict(saved)

    for _ in range(2):
        lowtide.sleep(model, optimizer, drop=["parameters"])
        lowtide.wake(model, optimizer)  # all but them
        assert torch.equal(model.table, torch.arange(4.0))
        with pytest.raises(RuntimeError, match=r"refill= if they were dropped"):
            model(inputs)
        with pytest.raises(RuntimeError, match=r"that was dropped.*refill=\.\.\."):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"layers\.0\.\S+: " + GIVEN_ANEW):
            next(model.layers[0].parameters()).to_local().sum()
        lowtide.wake(model, optimizer, refill=load)
        assert not sleeping._asleep
    model.reshard()
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert_same_tensors(everything(model, optimizer), held, "refilled")
    with torch.no_grad():
        assert torch.equal(model(inputs), logits)
    optimizer.step()


@pytest.mark.parametrize("name", ["foreach", "local parameters"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_are_loaded_anew(pool_of, world_size, name):
    pool_of(world_size).run(refill_parameters, name)


def refill_some(path: Path) -> tuple[str, list[str]]:
    """Each time something is missing, and all is dropped again."""
    model, optimizer = trained()
    held = everything(model, optimizer)
    lowtide.save(path, model, optimizer)
    saved = {n: v.clone() for n, v in model.state_dict().items()}
    missing = [*saved][-1]
    some = {n: v for n, v in saved.items() if n != missing}
    said = []

    def a_part_of_one() -> None:
        model.load_state_dict(saved)
        local = model.state_dict()[missing].to_local()
        if local.numel():
            local.view(-1)[-1:].view(torch.int32).fill_(-1)

    def raises() -> None:
        raise KeyError("no file")

    lowtide.sleep(model, optimizer, drop=["parameters", "states"])
    for refill in (
        lambda: None,
        lambda: model.load_state_dict(some, strict=False),
        lambda: model.load_state_dict(saved),  # and no states
        a_part_of_one,
        raises,
    ):
        try:
            lowtide.wake(model, optimizer, refill=refill)
        except (ValueError, KeyError) as error:
            said.append(str(error))
        with pytest.raises(RuntimeError, match=GIVEN_ANEW):
            model.state_dict()[missing].to_local().view(-1).sum()
        with pytest.raises(RuntimeError, match="that was dropped"):
            optimizer.step()
    lowtide.wake(model, optimizer, refill=lambda: lowtide.load(path, model, optimizer))
    assert not sleeping._asleep
    assert_same_tensors(everything(model, optimizer), held, "loaded")
    return missing, said


def test_what_is_not_given_anew_is_named(pool_of, tmp_path):
    for missing, said in pool_of(2).run(refill_some, tmp_path / "checkpoint"):
        nothing, some, no_states, partly, raised = said
        assert "lowtide: wake: expected refill to write all of what was" in nothing
        assert "as they were. Load them" in nothing
        assert f"elements of {missing} as they were" in some
        assert "elements of state 'step' of" in no_states
        assert "got 1 of " in partly
        assert "no file" in raised


# -- states ---------------------------------------------------------------------------


def load_states() -> None:
    model, optimizer = trained()
    held = everything(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    lowtide.sleep(model, optimizer, drop=["states"])
    lowtide.wake(model, optimizer)
    with pytest.raises(RuntimeError, match=r"got state '\w+' of .* that was dropped"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    lowtide.wake(model, optimizer)
    assert not sleeping._asleep
    assert_same_tensors(everything(model, optimizer), held, "loaded")
    optimizer.step()


def test_states_are_loaded_anew(pool_of):
    pool_of(2).run(load_states)


# -- a reference model, and bytes -----------------------------------------------------


def reference(sharded: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    if sharded:
        torch.distributed.fsdp.fully_shard(model)
    model.eval().requires_grad_(False)
    saved = {n: v.clone() for n, v in model.state_dict().items()}
    x = torch.randn(8, 16)
    expected = model(x)
    tally = ledger(CPU).total_live
    lowtide.sleep(model, drop=["parameters"])
    with pytest.raises(RuntimeError, match="0.weight: " + GIVEN_ANEW):
        model[0].weight.sum()
    lowtide.wake(model, refill=lambda: model.load_state_dict(saved))
    assert torch.equal(model(x), expected)
    assert ledger(CPU).total_live == tally


@pytest.mark.parametrize("sharded", [False, True])
def test_a_reference_model_is_loaded_anew(pool_of, sharded):
    pool_of(2).run(reference, sharded)


def bytes_on_the_host() -> None:
    model, optimizer = trained()
    waiting = host_pool(CPU).ledger
    lowtide.sleep(model, optimizer)
    assert waiting.total_live > 10_000
    lowtide.wake(model, optimizer)
    live = ledger(CPU).total_live
    lowtide.sleep(model, optimizer, drop=sleeping.PARTS)
    assert waiting.total_live <= 512  # a buffer
    assert ledger(CPU).total_live < live // 4


def test_what_is_dropped_takes_no_host_memory(pool_of):
    pool_of(2).run(bytes_on_the_host)


def test_what_is_dropped_is_a_part_that_sleeps():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"expected drop of parameters, .* got 'all'"):
        lowtide.sleep(model, drop=["all"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"drop among parts \(states\), got gradients"):
        lowtide.sleep(model, parts=["states"], drop=["gradients"])
