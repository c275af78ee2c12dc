"""Experts in their blocks, by a `fully_shard` call of their own or by the block's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from case import Case, Row, rows_of

from cases.experts import calls_of, gib, times_of
from cases.foreign_scripts import Script, plan_of
from cases.time_llama import ms

NAME = "experts_in_blocks"
PROGRAM = "experts_in_blocks.py"
ONE_CALL = "lowtide, one call a block"


@dataclass(frozen=True)
class Setting:
    ranks: int
    checkpointed: bool = False

    def __str__(self) -> str:
        return f"{self.ranks} ranks" + ", checkpointed" * self.checkpointed

    def systems(self) -> dict[str, str]:
        """And the program's arguments."""
        two = {"lowtide": "lowtide two", "fsdp2": "fsdp2 two"}
        if self.checkpointed:
            return {name: f"{how} checkpointed" for name, how in two.items()}
        return two | {ONE_CALL: "lowtide one"}


SETTINGS = tuple(
    Setting(ranks, checkpointed) for ranks in (8, 64) for checkpointed in (False, True)
)


def rows_at(setting: Setting) -> Iterator[Row]:
    row = rows_of(NAME)
    for system, how in setting.systems().items():
        script = Script(
            f"{system}, {setting}", PROGRAM, how, world=setting.ranks, packages=False
        )
        plan, _ = plan_of(script, "--time")
        reserved = gib(plan["peak_reserved"])
        yield row(system, f"reserved, {setting}", reserved, "GiB", "simulated")
        for what, seconds in times_of(plan).items():
            note = calls_of(plan) if what == "communication" else ""
            quantity = f"{what}, {setting}"
            yield row(system, quantity, ms(seconds), "ms", "simulated", note)


PARTS = {str(setting): partial(rows_at, setting) for setting in SETTINGS}


def measure() -> list[Row]:
    return [row for rows in PARTS.values() for row in rows()]


CASE = Case(
    name=NAME,
    describe="Experts in their blocks, by one `fully_shard` call or two, and FSDP2.",
    how="""\
`programs/experts_in_blocks.py`: twelve blocks of width 4096, attention and 32 experts
of three matrices of 1536 over groups of 2 ranks, 4096 tokens a rank to two experts
each, bf16 compute, fp32 reduction. The experts are sharded over the ranks that have the
same ones by a call of their own inside the block's, or by the block's, whose
`shard_placement_fn` gives them their mesh (FSDP2 has that from torch 2.12 on, and is
shown with two calls). `python -m lowtide plan --time` says what the process reserves
(the most of three steps) and how long the third takes on H100s ([time.md](time.md)).

With 64 ranks the wire is busy for most of the step. At 8 ranks, checkpointed, 0.5 ms
more is exposed than with FSDP2, which computes 15 ms longer (step less exposed), copies
of what it gathered and sends among it, and has that to hide behind.""",
    run=measure,
    parts=PARTS,
    only_by_name="ten plans take minutes",
)
