"""What a resize of the world leaves in a process that goes on, beside FSDP2's."""

from __future__ import annotations

from case import Case, Row, rows_of
from footprint import slope
from worlds import GROUPS, RANKS, SYSTEMS, worlds

from support.ranks import RankPool

NAME = "worlds"
COUNT = 150
HELD = {
    "heap": ("bytes allocated", "KiB"),
    "resident": ("resident memory", "KiB"),
    "descriptors": ("open descriptors", ""),
    "threads": ("threads", ""),
    "ledger": ("bytes in the ledgers", "B"),
}


def measure() -> list[Row]:
    row = rows_of(NAME)
    result = []
    for system in SYSTEMS:
        with RankPool(RANKS, group=False) as pool:
            ranks = pool.run(worlds, system, COUNT, timeout=1800)
        for rank in (1, 0):
            settled = ranks[rank][COUNT // 2 :]
            for quantity, (name, unit) in HELD.items():
                grown = slope([float(each[quantity]) for each in settled])
                scale = 1024 if unit == "KiB" else 1
                result.append(
                    row(
                        system,
                        f"{name}, more for each world, rank {rank}",
                        round(grown / scale, 1),
                        unit,
                        "measured",
                    )
                )
    return result


CASE = Case(
    name=NAME,
    describe="What a resize of the world leaves in a process that goes on.",
    how=f"""\
`programs/worlds.py` on two gloo ranks: {COUNT} times process groups are made, two
layers are sharded and trained for two steps, and the groups destroyed. *Collectives
alone*: no model, and collectives in {GROUPS} groups, as many as lowtide has. By the
slope (Theil-Sen) of the second half. *Bytes allocated* are glibc's of all arenas;
resident memory moves with fragments, too. Rank 0 keeps the store, and in it keys of
all groups.""",
    run=measure,
    only_by_name="takes minutes",
)
