"""Random programs for the caching allocator."""

from __future__ import annotations

import random
from typing import Any

from lowtide.phantom.traces import Operation, Trace

KIB, MIB = 1 << 10, 1 << 20

# Upper bounds of sizes and how often they are drawn: the pools' edges, and sizes that
# fill a device of a few GiB.
SIZES = (
    (4 * KIB, 3),
    (MIB, 3),
    (2 * MIB, 2),
    (10 * MIB, 3),
    (64 * MIB, 4),
    (300 * MIB, 1),
)
EDGES = (
    1,
    512,
    513,
    MIB,
    MIB + 1,
    2 * MIB,
    10 * MIB - 1,
    10 * MIB,
    10 * MIB + 1,
    20 * MIB,
)


def random_trace(
    seed: int, length: int, *, empty_cache: bool = True, **settings: Any
) -> Trace:
    """``length`` operations on four streams; about 60 allocations at a time.

    Every allocation is made and freed as if it succeeded.
    """
    rng = random.Random(seed)
    alive: list[int] = []
    operations: list[Operation] = []
    while len(operations) < length:
        draw = rng.random()
        if draw < 0.02:
            stream = rng.choice((None, 0, 1, 2, 3))
            operations.append(Operation("synchronize", stream=stream))
        elif draw < 0.025 and empty_cache:
            operations.append(Operation("empty_cache"))
        elif draw < 0.12 and alive:
            identity, stream = rng.choice(alive), rng.randrange(4)
            operations.append(Operation("record", identity, stream=stream))
        elif rng.random() < len(alive) / 120:
            identity = alive.pop(rng.randrange(len(alive)))
            operations.append(Operation("free", identity))
        else:
            identity = len(operations)
            alive.append(identity)
            operations.append(
                Operation(
                    "allocate", identity, _size(rng), rng.choice((0, 0, 0, 1, 2, 3))
                )
            )
    return Trace(operations, settings)


def _size(rng: random.Random) -> int:
    if rng.random() < 0.2:
        return rng.choice(EDGES)
    bounds, weights = zip(*SIZES, strict=True)
    return rng.randint(1, rng.choices(bounds, weights)[0])
