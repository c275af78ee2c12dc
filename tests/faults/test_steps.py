"""Every fault of a step: with ``lowtide.step`` it is retried to the same bits; what
becomes of training without it, and with FSDP2, is the table of docs/design/recovery.md.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowtide
from faults.classes import FAULTS, run_failing
from faults.training import FAILING, STEPS, Training
from lowtide.stepping import StepUndone
from support.bits import assert_same_tensors, same_bits

PAGE = Path(__file__).parents[2] / "docs/design/recovery.md"


def train(system: str, variant: str, skip: int | None = None) -> dict[str, Any]:
    training = Training(system, variant)
    for number in range(STEPS):
        if number != skip:
            training.step(number)
    return training.state()


def retried(name: str, on_ranks: str) -> None:
    fault = FAULTS[name]
    expected = train("lowtide", fault.variant)
    training = Training("lowtide", fault.variant)
    armed = on_ranks == "all" or dist.get_rank() == 1
    for number in range(STEPS):
        block = lowtide.step(training.model, training.optimizer)
        if number == FAILING:
            before = training.state()
            if armed:
                run_failing(training, number, fault, block)
            else:
                with pytest.raises(StepUndone, match="got on rank 1"), block:
                    training.step(number)
            assert_same_tensors(training.state(), before, name)
        with block:
            training.step(number)
    assert_same_tensors(training.state(), expected, name)


def caught(name: str, system: str) -> str:
    """What becomes of training that catches what was raised and leaves the step out."""
    fault = FAULTS[name]
    expected = train(system, fault.variant, skip=FAILING)
    training = Training(system, fault.variant)
    for number in range(STEPS):
        if number != FAILING:
            try:
                training.step(number)
            except Exception as error:
                return f"next step raises {type(error).__name__}"
            continue
        generator = torch.get_rng_state()
        run_failing(training, number, fault, contextlib.nullcontext())
        torch.set_rng_state(generator)
        training.optimizer.zero_grad()
    state = training.state()
    same = list(state) == list(expected) and all(
        same_bits(state[key], expected[key]) for key in expected
    )
    return "as if skipped" if same else "other values"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_step_is_retried_to_the_same_bits(ranks, name):
    ranks.run(retried, name, "all")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, fault in FAULTS.items() if not fault.in_collectives]
)
def test_what_one_rank_raises_beside_collectives_is_retried(ranks, name):
    ranks.run(retried, name, "one")


def table() -> dict[str, tuple[str, str]]:
    """What the page says of each fault: of lowtide without a block, and of FSDP2."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.M)
    return {row[0]: (row[1], row[2]) for row in rows if row[1] in BECOMES}


BECOMES = ("as if skipped", "other values", "-")


def test_the_page_has_every_fault():
    assert set(table()) == set(FAULTS)


def test_the_page_names_tests_that_exist():
    """Of the faults that are tested elsewhere."""
    named = re.findall(r"`(tests/[\w/]+\.(?:py|cpp))`", PAGE.read_text())
    assert len(named) > 8
    assert [name for name in named if not (PAGE.parents[2] / name).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("system", ["lowtide", "fsdp2"])
@pytest.mark.parametrize("name", FAULTS)
def test_the_page_says_what_happens_without_it(ranks, name, system):
    said = table()[name][system == "fsdp2"]
    if system not in FAULTS[name].systems:
        assert said == "-"
        return
    (found,) = set(ranks.run(caught, name, system))
    assert found == said
