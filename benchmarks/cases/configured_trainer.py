"""torchtitan 0.3 on its own configuration, under FSDP2 and under `lowtide run`."""

from __future__ import annotations

from functools import partial

from case import Case, Row, rows_of
from points import Points

NAME = "configured_trainer"
GIB = 1 << 30
PROGRAM = ("titan_configured.py", "llama3", "llama3_8b")
# Options of the program, by name and ranks.
POINTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "8 ranks, as configured": (8, ()),
    "8 ranks, without CUDA graphs": (8, ("no_graphs",)),
    "8 ranks, without CUDA graphs, full checkpointing": (
        *(8, ("no_graphs", "full_checkpointing")),
    ),
    "128 ranks, without CUDA graphs": (128, ("no_graphs",)),
}


def rows_at(point: str) -> list[Row]:
    ranks, options = POINTS[point]
    row = rows_of(NAME)
    runs = [(system, *PROGRAM, *options) for system in ("lowtide", "fsdp2")]
    points = Points("unedited.py", world=ranks, timeout=3600)
    ours, theirs = (found["from_start"] for found in points.each(runs))
    where = f"torchtitan 0.3, Llama 3 8B, {point}"
    return [
        *(
            row(
                *(system, f"reserved, {where}", round(found["reserved"] / GIB, 2)),
                *("GiB", "simulated"),
                f"allocated {found['allocated'] / GIB:.2f}",
            )
            for system, found in (("lowtide", ours), ("fsdp2", theirs))
        ),
        row(
            *("lowtide", f"of FSDP2's reserved, {where}"),
            *(round(ours["reserved"] / theirs["reserved"], 3), "", "arithmetic"),
        ),
    ]


CASE = Case(
    name=NAME,
    describe="torchtitan 0.3 as it configures Llama 3 8B: `lowtide run` and FSDP2.",
    how="""\
torchtitan's newest release with torch 2.15, its configuration `llama3_8b`: one sequence
of 8,192 tokens a rank, FlexAttention, selective checkpointing, the loss by eight chunks
of tokens, forward and backward in a CUDA graph; only tokens, logging and the number of
steps are ours. On the [driver that computes nothing](design/phantom.md), with torch's
own segments; the highest figure of four steps.

The loss by chunks has the head's gradient whole in both systems (2 GiB in fp32), and
16 GiB at the peak are activations that selective checkpointing keeps. A graph has
memory of its own, beside gradients of the eager step before it.""",
    run=lambda: [row for point in POINTS for row in rows_at(point)],
    parts={point: partial(rows_at, point) for point in POINTS},
)
