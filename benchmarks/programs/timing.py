"""Time that a GPU spends on work issued to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles

import torch

Milliseconds = dict[str, list[float]]
ROUNDS_FOR_QUARTILES = 4  # of fewer they lie outside what was seen


def in_turns(
    actions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int,
    after: Callable[[str], object] = lambda name: None,
) -> Milliseconds:
    """Each action once a round, one after the other, on the current stream. The host
    waits only at the end. ``after`` follows an action outside its time."""
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
    for turn in range(warm_up + rounds):
        for name, action in actions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            action()
            end.record()
            after(name)
            if turn >= warm_up:
                marks.setdefault(name, []).append((begin, end))
    torch.cuda.synchronize()
    return {
        name: [begin.elapsed_time(end) for begin, end in pairs]
        for name, pairs in marks.items()
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | str]:
    """The middle of the rounds' ratios, and between what half of them lie, or all where
    they are few: ``share``."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high, share = min(ratios), max(ratios), "all"
    if len(ratios) >= ROUNDS_FOR_QUARTILES:
        (low, _, high), share = quantiles(ratios, n=4), "half"
    return {"median": median(ratios), "low": low, "high": high, "share": share}
