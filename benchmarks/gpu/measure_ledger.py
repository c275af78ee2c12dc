"""A step on the GPU beside the same step over the dry driver, and beside lowtide's
ledger."""

from __future__ import annotations

from collections.abc import Iterator

import bars
from bars import row, with_bar
from case import Row
from figures import FLAGS, GIB, Figures, Programs
from scale import Scale

KINDS = ("allocated", "reserved")


def ledger(scale: Scale, programs: Programs) -> Figures:
    figures = {}
    for segments in scale.segments:
        options = (*scale.accounted, "--loss", scale.llama_loss, *FLAGS[segments])
        of_ledger, cuda = programs.together(
            [("ledger.py", *options), ("llama_memory.py", *options)]
        )
        figures[segments] = {
            "ledger": of_ledger,
            "cuda": cuda["steady"],
            "dry": programs.dry("llama_memory.py", *options)["steady"],
        }
    return figures


def ledger_rows(figures: Figures) -> Iterator[Row]:
    for segments, seen in figures.items():
        setting = f"two blocks, {segments} segments"
        for kind in KINDS:
            here, dry = seen["cuda"][kind], seen["dry"][kind]
            quantity = f"{setting}: peak {kind}"
            yield row("CUDA", quantity, here / GIB, "GiB", "measured")
            yield row("dry", quantity, dry / GIB, "GiB", "simulated")
            different = f"{setting}: peak {kind} differs from the dry step's by"
            yield from with_bar(different, abs(here - dry), bars.NONE, "B")
        for key, value in seen["ledger"].items():
            yield row("lowtide", f"{setting}: {key}", value / GIB, "GiB", "measured")
