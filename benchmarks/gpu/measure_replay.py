"""The allocator model and the ledger beside torch's allocator."""

from __future__ import annotations

from collections.abc import Iterator

import bars
from bars import row, with_bar
from case import Row
from measuring import FLAGS, GIB, Programs
from scale import Scale
from step import Figures


def replay(scale: Scale, programs: Programs) -> Figures:
    figures = {}
    for segments in scale.segments:
        options = (*scale.replayed, "--loss", scale.llama_loss, *FLAGS[segments])
        both = [(name, *options) for name in ("allocator_replay.py", "llama_memory.py")]
        cuda, simulated = programs.together(both)
        figures[segments] = {"cuda": cuda, "simulated": simulated["steady"]}
    return figures


def replay_rows(figures: Figures) -> Iterator[Row]:
    for segments, both in figures.items():
        seen, simulated = both["cuda"], both["simulated"]
        setting = f"replay, {segments} segments"
        calls = seen["calls observed"]
        yield row("lowtide", f"{setting}: calls compared", calls, "", "measured")
        for key in (
            "differences in the history",
            "differences in allocated",
            "differences in reserved",
        ):
            yield from with_bar(f"{setting}: {key}", seen[key], bars.NONE)
        for kind in ("allocated", "reserved"):
            quantity = f"{setting}: peak {kind}"
            for system, value in (
                ("CUDA", seen["cuda"][kind]),
                ("model, asked the same", seen["model"][kind]),
                ("simulated step", simulated[kind]),
            ):
                how = "measured" if system == "CUDA" else "simulated"
                yield row(system, quantity, value / GIB, "GiB", how)
        for key, value in seen["ledger"].items():
            yield row("lowtide", f"{setting}: {key}", value / GIB, "GiB", "measured")
