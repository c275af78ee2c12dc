"""Times of the phantom's clock beside what the GPU takes: of single operators, and of
steps of the slice."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import geometric_mean, median

from bars import row
from case import Row
from figures import Figures, Programs
from scale import Scale

SYSTEMS = ("fsdp2", "lowtide")


def clock(scale: Scale, programs: Programs) -> Figures:
    rates = ("rates.py", scale.rate_tokens, scale.rounds)
    steps = ("llama_speed.py", *scale.llama, "--loss", scale.llama_loss)
    steps += ("--rounds", str(scale.rounds))
    with ThreadPoolExecutor() as threads:
        clocked = [threads.submit(programs.clocked, *call) for call in (rates, steps)]
        here = programs(*rates), programs(*steps)["ms"]
        return {
            "operators": {"CUDA": here[0], "clock": clocked[0].result()},
            "steps": {
                place: {system: median(ms[system]) for system in SYSTEMS}
                for place, ms in (
                    ("CUDA", here[1]),
                    ("clock", clocked[1].result()["ms"]),
                )
            },
        }


def clock_rows(figures: Figures) -> Iterator[Row]:
    for what, seen in figures.items():
        shares: dict[str, list[float]] = {}
        for name, ms in seen["CUDA"].items():
            said = seen["clock"][name]
            yield row("CUDA", f"{what}, {name}", ms, "ms", "measured")
            yield row("clock", f"{what}, {name}", said, "ms", "simulated")
            shares.setdefault(name.split(":")[0], []).append(said / ms)
        for kind, all_shares in shares.items():
            share = geometric_mean(all_shares)
            yield row("clock", f"{what}, {kind}: of CUDA's", share, "", "measured")
