"""What tensor subclasses are made of, torchao's weights and optimizers' states, through
checkpoints, naps and undone steps: training goes on bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchao.optim
from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

import lowtide
from support.bits import same_bits
from support.optimizers import compiling
from support.quantized import MODELS, SETTINGS, blocks, loss_of, optimizer_of, wrap

OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
KINDS = (*MODELS, *OPTIMIZERS)
Training = tuple[Any, torch.optim.Optimizer]


def make(kind: str) -> Training:
    if kind not in OPTIMIZERS:
        model = wrap("lowtide", MODELS[kind](), **SETTINGS.get(kind, {}))
        return model, optimizer_of(model)
    model = wrap("lowtide", blocks())
    return model, getattr(torchao.optim, kind)(model.parameters(), lr=0.01)


def step(training: Training, number: int) -> float:
    model, optimizer = training
    loss = loss_of(model, number, dist.get_rank())
    loss.backward()
    with compiling("torchao", []):
        optimizer.step()
    optimizer.zero_grad()
    # Scales are of the new weights: float8's, else nothing.
    precompute_float8_dynamic_scale_for_fsdp(model)
    return loss.item()


def after(training: Training) -> list[float]:
    return [step(training, number) for number in range(2, 5)]


def on_the_way(kind: str, path: Path, background: bool) -> dict[str, list[float]]:
    """Losses behind two steps, by what happened then."""
    losses: dict[str, list[float]] = {}
    for what in ("nothing", "a nap", "an undone step"):
        training = make(kind)
        for number in range(2):
            if what == "an undone step":
                undo(training)  # also before there are states and scales
            step(training, number)
        if what == "nothing":
            saving = lowtide.save(path, *training, in_background=background)
            if saving is not None:
                saving.wait()
        elif what == "a nap":
            lowtide.sleep(*training)
            lowtide.wake(*training)
        losses[what] = after(training)
    for what in ("a load", "a load into others"):
        training = make(kind)
        if what == "a load into others":
            step(training, 7)
        lowtide.load(path, *training)  # scales of other weights are gone
        losses[what] = after(training)
    return losses


class Interrupted(Exception):
    pass


def undo(training: Training) -> None:
    with contextlib.suppress(Interrupted), lowtide.step(*training):
        step(training, 8)
        raise Interrupted


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on(pool_of, tmp_path, kind):
    background = KINDS.index(kind) % 2 == 1
    for losses in pool_of(2).run(on_the_way, kind, tmp_path / "saved", background):
        for what, values in losses.items():
            assert values == losses["nothing"], what


def state_of(training: Training) -> torch.Tensor:
    state: Any = next(iter(training[1].state.values()))["exp_avg"]
    return state._local_tensor.dequantize()


def save(path: Path) -> torch.Tensor:
    training = make("AdamW8bit")
    step(training, 0)
    lowtide.save(path, *training)
    return state_of(training)


def load(path: Path) -> torch.Tensor:
    training = make("AdamW8bit")
    lowtide.load(path, *training)
    return state_of(training)


def test_states_are_divided_among_more_ranks_and_fewer_are_refused(pool_of, tmp_path):
    saved = torch.cat(pool_of(2).run(save, tmp_path / "saved"))
    assert same_bits(torch.cat(pool_of(4).run(load, tmp_path / "saved")), saved)
    (outcome,) = pool_of(1).outcomes(load, tmp_path / "saved")
    assert "of [64, 128], which can not be joined with others" in outcome.error
