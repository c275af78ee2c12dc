"""Whether a step happened, by ranks that are threads here, over one store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lowtide.stepping import decision
from lowtide.stepping.decision import Answer, Decision

WORLD = 2
MADE: Answer = Answer(True)
TORN: Answer = Answer(False, 1, False, "ValueError: torn")


@dataclass(eq=False)
class Group:
    """All that is asked of a process group."""

    number: int
    group_name: str = "0"

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return WORLD


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(decision, "_timeout", lambda group: timedelta(seconds=20))
    return store


def step(groups: list[Any], torn: bool = False) -> list[Answer]:
    """Rank 1 tears it when rank 0 is through."""
    decisions = [Decision(group) for group in groups]
    with ThreadPoolExecutor(WORLD) as threads:
        first = threads.submit(decisions[0].done, lambda: None)
        if torn:
            second = decisions[1].failed(ValueError("torn"))
        else:
            second = decisions[1].done(lambda: None)
        return [first.result(), second]


def groups() -> list[Any]:
    return [Group(rank) for rank in range(WORLD)]


@pytest.mark.parametrize("torn", [False, True])
def test_the_ranks_agree_and_leave_nothing(store: dist.Store, torn: bool) -> None:
    of_first = groups()
    for _ in range(3):
        assert step(of_first, torn) == [TORN if torn else MADE] * WORLD
        assert store.num_keys() == 0


def test_a_group_that_is_made_anew_knows_no_step_of_the_last(
    store: dist.Store,
) -> None:
    """On the same store, by the same name."""
    of_first = groups()
    assert step(of_first) == step(of_first) == [MADE] * WORLD
    of_second = groups()
    assert step(of_second) == [MADE] * WORLD
    assert step(of_second, torn=True) == [TORN] * WORLD
