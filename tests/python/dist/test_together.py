"""What a training has around its steps, all at once, around a model of transformers:
``wrap`` with offloaded activations and deferred logits, accumulation, clipping,
``lowtide.step``, a checkpoint and what goes on from it."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowtide
from lowtide.losses import _heads
from lowtide.stepping import StepUndone
from support.bits import assert_same_tensors
from support.bombs import Boom
from support.breaking import BreaksAt
from support.models import MODELS
from support.saving import shards

STEPS, MICROBATCHES = 4, 2


def make() -> tuple[Any, torch.optim.Optimizer]:
    model = MODELS["llama"].build()
    model.config.use_cache = False
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        lowtide.wrap(model, activations=lowtide.ActivationPolicy(offload=["input"]))
    assert dist.get_rank() != 0 or "logits are deferred" in printed.getvalue()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def one_step(
    model: Any, optimizer: torch.optim.Optimizer, number: int, breaks: Any
) -> None:
    for microbatch in range(MICROBATCHES):
        model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
        generator = torch.Generator().manual_seed(10 * number + microbatch)
        MODELS["llama"].loss(model, generator).backward()
    lowtide.clip_grad_norm_(model.parameters(), 0.5)
    with breaks:
        optimizer.step()
    optimizer.zero_grad()


def train(folder: Path | None) -> Any:
    """Without a folder nothing goes wrong; else every step breaks once on the last
    rank, and another model goes on half-way."""
    last = dist.get_rank() == dist.get_world_size() - 1
    torch.manual_seed(0)
    model, optimizer = make()
    for number in range(STEPS):
        if folder is not None:
            if number == STEPS // 2:
                lowtide.save(folder / "half", model, optimizer, {"step": number})
                model, optimizer = make()
                assert lowtide.load(folder, model, optimizer) == {"step": number}
            breaks = BreaksAt(9 if last else None)
            with pytest.raises(Boom if last else StepUndone):
                with lowtide.step(model, optimizer):
                    one_step(model, optimizer, number, breaks)
        with lowtide.step(model, optimizer), warnings.catch_warnings():
            warnings.filterwarnings("error", "lowtide: deferred logits")
            one_step(model, optimizer, number, contextlib.nullcontext())
    assert _heads.tally_of(model.lm_head).made.total() == 0
    return shards(model, optimizer)


def test_a_run_that_breaks_and_resumes_has_the_bits_of_one_that_does_not(
    pool_of, tmp_path
):
    pool = pool_of(2)
    expected = pool.run(train, None)
    for rank, actual in enumerate(pool.run(train, tmp_path)):
        assert_same_tensors(actual, expected[rank], f"rank {rank}")
