"""``grads="fused"``: a step that failed leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

import lowtide
from support.fused import data, model_of
from support.recorder import Record, Recorder, assert_same_records, finish_step


class Boom(RuntimeError):
    pass


def trained_through(failing: tuple[int, ...]) -> Record:
    """Steps 0 to 2, those in `failing` raise in backward, after some products."""
    model, record = model_of("fused"), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def boom(gradient: torch.Tensor) -> None:
        raise Boom

    for step in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x = data(2 * step + micro, grad=True)
            if step in failing and micro == 1:
                x.register_hook(boom)
            loss = model(x).pow(2).sum()
            try:
                loss.backward()
            except Boom:
                continue
        if step in failing:
            lowtide.abort_step(model)
            optimizer.zero_grad()
            continue
        finish_step(model, optimizer, record)
    return record.values


def without_step_one() -> Record:
    model, record = model_of("fused"), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in (0, 2):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model(data(2 * step + micro, grad=True)).pow(2).sum().backward()
        finish_step(model, optimizer, record)
    return record.values


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_step_is_skipped(pool_of, ranks):
    failed = pool_of(ranks).run(trained_through, (1,))
    skipped = pool_of(ranks).run(without_step_one)
    for actual, expected in zip(failed, skipped, strict=True):
        assert_same_records(actual, expected)
