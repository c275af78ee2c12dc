"""Peak reserved memory of Llama training steps, simulated, lowtide beside others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from case import Case, Row, rows_of
from launch import run

NAME = "memory_llama"
GIB = 1 << 30
ALLOCATORS = {"default": (), "expandable": ("--expandable",)}
# "Its best": the least reserved of these.
CHUNKS = (4, 8, 16, 32)
UNITS = ("split", "root")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    config: str = "8b"
    world: int = 8
    sequence: int = 8192
    checkpoint: str = "full"
    microbatches: int = 1
    # Of reserved bytes beside FSDP2's best, by loss and allocator.
    bars: dict[tuple[str, str], float] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        parts = [f"{self.config.upper()}, {self.world} ranks, s {self.sequence}"]
        if self.checkpoint != "full":
            parts.append(f"{self.checkpoint} checkpointing")
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} microbatches without sync")
        return ", ".join(parts)

    @property
    def arguments(self) -> tuple[str, ...]:
        return (
            *("--config", self.config),
            *("--world", str(self.world)),
            *("--sequence", str(self.sequence)),
            *("--checkpoint", self.checkpoint),
            *("--microbatches", str(self.microbatches)),
        )


SAME_LOSS, BEST_LOSS = "same loss", "best loss"
SETTINGS = (
    Setting(
        world=8,
        bars={
            (SAME_LOSS, "default"): 0.75,
            (SAME_LOSS, "expandable"): 0.79,
            (BEST_LOSS, "default"): 0.70,
            (BEST_LOSS, "expandable"): 0.77,
        },
    ),
    Setting(
        world=64,
        bars={
            (SAME_LOSS, "default"): 0.72,
            (SAME_LOSS, "expandable"): 0.86,
            (BEST_LOSS, "default"): 0.55,
            (BEST_LOSS, "expandable"): 0.66,
        },
    ),
    Setting(world=256),
    Setting(world=8, sequence=32768),
    Setting(world=8, checkpoint="selective"),
    Setting(world=8, checkpoint="none"),
    Setting(
        world=8,
        microbatches=4,
        bars={(SAME_LOSS, "default"): 0.90, (SAME_LOSS, "expandable"): 0.90},
    ),
    Setting(config="70b", world=256),
)
# lowtide's levers one at a time, from FSDP2's schedule of units and loss on.
LEVERS = (
    ("root as one unit", "--units", "root", "--loss", "chunked:8"),
    (
        "embedding and head units of their own",
        *("--loss", "chunked:8", "--gather-embedding-in-backward"),
    ),
    ("no gather of the embedding in backward", "--loss", "chunked:8"),
    ("token-chunked loss without a graph", "--loss", "tokens"),
    ("loss over rows of the head", "--loss", "vocabulary"),
    (
        "the same, ring of 1 GiB instead of 64 MiB",
        *("--loss", "vocabulary", "--gradient-budget", str(GIB)),
    ),
)
LEVER_SETTING = Setting(world=64)


def measure() -> list[Row]:
    with ThreadPoolExecutor(max_workers=2) as threads:
        rows = [row for setting in SETTINGS for row in rows_for(setting, threads)]
        return rows + list(lever_rows(threads))


def record(arguments: Sequence[str]) -> Figures:
    figures = json.loads(run("llama_memory.py", *arguments, timeout=1800))
    assert isinstance(figures, dict)
    return figures


def reserved(figures: Figures) -> int:
    return int(figures["steady"]["reserved"])


def best(runs: Iterable[tuple[str, Figures]]) -> tuple[str, Figures]:
    return min(runs, key=lambda named: reserved(named[1]))


def rows_for(setting: Setting, threads: ThreadPoolExecutor) -> Iterator[Row]:
    for allocator, flags in ALLOCATORS.items():
        variants = {
            ("fsdp2", f"{chunks} chunks, {units}"): (
                *("--system", "fsdp2", "--loss", f"chunked:{chunks}"),
                *("--units", units),
            )
            for chunks in CHUNKS
            for units in UNITS
        }
        variants |= {
            ("lowtide", f"{chunks} chunks"): (
                *("--system", "lowtide", "--loss", f"chunked:{chunks}"),
            )
            for chunks in CHUNKS
        }
        for form in ("tokens", "vocabulary"):
            variants["lowtide", form] = ("--system", "lowtide", "--loss", form)
        arguments = [(*v, *setting.arguments, *flags) for v in variants.values()]
        found = dict(zip(variants, threads.map(record, arguments), strict=True))
        theirs = best((n, f) for (s, n), f in found.items() if s == "fsdp2")
        same = best(
            (n, f) for (s, n), f in found.items() if "chunks" in n and s != "fsdp2"
        )
        ours = best((n, f) for (s, n), f in found.items() if s == "lowtide")
        name = f"{setting}, {allocator} segments"
        yield from compare(setting, allocator, f"{name}, {SAME_LOSS}", same, theirs)
        yield from compare(setting, allocator, f"{name}, {BEST_LOSS}", ours, theirs)


def compare(
    setting: Setting,
    allocator: str,
    name: str,
    ours: tuple[str, Figures],
    theirs: tuple[str, Figures],
) -> Iterator[Row]:
    row = rows_of(NAME)
    for system, (variant, figures) in (("lowtide", ours), ("fsdp2", theirs)):
        steady, start = figures["steady"], figures["from_start"]
        peak = max(steady["moments"], key=lambda m: steady["moments"][m]["allocated"])
        note = (
            f"{variant}; allocated {gib(steady['allocated'])}, peak in {peak}; from "
            f"the process's start {gib(start['reserved'])} reserved"
        )
        value = gib(steady["reserved"])
        yield row(system, f"reserved, {name}", value, "GiB", "simulated", note)
        share = steady["reserved"] / steady["allocated"]
        quantity = f"reserved / allocated, {name}"
        yield row(system, quantity, round(share, 3), "", "simulated")
    bar = setting.bars.get((name.rsplit(", ", 1)[1], allocator))
    share = reserved(ours[1]) / reserved(theirs[1])
    quantity = f"of FSDP2's reserved, {name}"
    yield row("lowtide", quantity, round(share, 3), "", "simulated")
    if bar is not None:
        yield row("bar", quantity, bar, "", "arithmetic")


def lever_rows(threads: ThreadPoolExecutor) -> Iterator[Row]:
    row = rows_of(NAME)
    for allocator, flags in ALLOCATORS.items():
        arguments = [
            ("--system", "lowtide", *lever[1:], *LEVER_SETTING.arguments, *flags)
            for lever in LEVERS
        ]
        for lever, figures in zip(LEVERS, threads.map(record, arguments), strict=True):
            quantity = f"lever, {LEVER_SETTING}, {allocator} segments: {lever[0]}"
            note = f"allocated {gib(figures['steady']['allocated'])}"
            value = gib(reserved(figures))
            yield row("lowtide", quantity, value, "GiB", "simulated", note)


def gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 2)


CASE = Case(
    name=NAME,
    describe="Peak reserved memory of a Llama step, simulated, beside FSDP2.",
    how="""\
`programs/llama_memory.py` on the simulated device (`lowtide.phantom`, meta mode): the
unmodified systems run, operators have no bytes, and a model of CUDA's caching allocator
answers; rank 0, batch 1, bf16 compute, fp32 reduction, fused AdamW, gradients clipped.
The figure is the highest of the third step, when the optimizer has its state.

FSDP2 is its best: the least reserved of 4, 8, 16 and 32 chunks of tokens in the loss
(each checkpointed), and of embedding and head as units of their own or in the root's.
*same loss*: lowtide with that loss, best chunk count. *best loss*: the least of all,
`lowtide.losses.linear_cross_entropy` over tokens or over rows of the head included.
*bar*: what we set out to reach. Reserved bytes are chaotic in the shapes (rounding of
segments): neighbouring shapes differ by some percent.""",
    run=measure,
    headlines=tuple(
        f"reserved, {setting}, {allocator} segments, {BEST_LOSS}"
        for setting in SETTINGS
        for allocator in ALLOCATORS
    ),
    only_by_name="some two hundred simulated runs take an hour",
)
