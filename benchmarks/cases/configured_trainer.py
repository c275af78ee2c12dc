"""torchtitan 0.3 on its own configuration, under FSDP2 and under `lowtide run`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from case import Case, Row, rows_of
from points import Points

NAME = "configured_trainer"
GIB = 1 << 30
PROGRAM = ("titan_configured.py", "llama3", "llama3_8b")
NO_GRAPHS, WHOLE = "no_graphs", "whole_logits"
DEFER = ("--defer-logits",)
# What we set out to reach, of reserved beside allocated with our loss.
HELD_BAR = 1.06


@dataclass(frozen=True)
class Point:
    """``changes`` of the configuration, by the program's names; ``options`` of
    `lowtide run`; ``bar``: what we set out to reach, of FSDP2's reserved."""

    changes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    ranks: int = 8
    gpu: str = "h100"
    expandable: bool = False
    bar: float | None = None


# The names say ranks and changes.
POINTS = {
    "8 ranks, as configured": Point(),
    "8 ranks, without CUDA graphs": Point((NO_GRAPHS,)),
    "8 ranks, without CUDA graphs, full checkpointing": Point(
        (NO_GRAPHS, "full_checkpointing")
    ),
    "128 ranks, without CUDA graphs": Point((NO_GRAPHS,), ranks=128),
    "8 ranks, without CUDA graphs, float8 gathers": Point(
        (NO_GRAPHS, "float8_gathers")
    ),
    "8 ranks, without CUDA graphs, whole logits, same loss": Point((NO_GRAPHS, WHOLE)),
    "8 ranks, without CUDA graphs, whole logits, deferred logits": Point(
        (NO_GRAPHS, WHOLE), DEFER, bar=0.65
    ),
    "128 ranks, without CUDA graphs, whole logits, deferred logits": Point(
        (NO_GRAPHS, WHOLE), DEFER, ranks=128, bar=0.6
    ),
    "8 ranks of H200, two sequences, without CUDA graphs, whole logits, deferred "
    "logits": Point((NO_GRAPHS, WHOLE, "two_sequences"), DEFER, gpu="h200", bar=0.65),
    "8 ranks, as configured, expandable segments": Point(expandable=True),
    "8 ranks, without CUDA graphs, expandable segments": Point(
        (NO_GRAPHS,), expandable=True
    ),
    "8 ranks, without CUDA graphs, expandable segments, whole logits, deferred "
    "logits": Point((NO_GRAPHS, WHOLE), DEFER, bar=0.65, expandable=True),
    "128 ranks, without CUDA graphs, expandable segments, whole logits, deferred "
    "logits": Point((NO_GRAPHS, WHOLE), DEFER, ranks=128, bar=0.6, expandable=True),
    "8 ranks, without CUDA graphs, expandable segments, compiled, whole logits, "
    "deferred logits": Point(
        (NO_GRAPHS, "compiled", WHOLE), DEFER, bar=0.65, expandable=True
    ),
    "128 ranks, without CUDA graphs, expandable segments, compiled, whole logits, "
    "deferred logits": Point(
        (NO_GRAPHS, "compiled", WHOLE), DEFER, ranks=128, bar=0.6, expandable=True
    ),
}


def rows_at(name: str) -> list[Row]:
    point, row = POINTS[name], rows_of(NAME)
    first = ("--expandable",) if point.expandable else ()
    runs = [
        (*first, *("lowtide", *point.options), *PROGRAM, *point.changes),
        (*first, "fsdp2", *PROGRAM, *point.changes),
    ]
    points = Points("unedited.py", gpu=point.gpu, world=point.ranks, timeout=3600)
    found = dict(zip(("lowtide", "fsdp2"), points.each(runs), strict=True))
    reserved = {k: figures["from_start"]["reserved"] for k, figures in found.items()}
    where = f"torchtitan 0.3, Llama 3 8B, {name}"
    share = f"of FSDP2's reserved, {where}"
    rows = [
        row(
            *(system, f"reserved, {where}", round(reserved[system] / GIB, 2)),
            *("GiB", "simulated"),
            f"allocated {figures['from_start']['allocated'] / GIB:.2f}",
        )
        for system, figures in found.items()
    ]
    value = round(reserved["lowtide"] / reserved["fsdp2"], 3)
    rows.append(row("lowtide", share, value, "", "arithmetic"))
    if point.bar is not None:
        rows.append(row("bar", share, point.bar, "", "arithmetic"))
    if point.options == DEFER:
        peaks = found["lowtide"]["from_start"]
        held = round(peaks["reserved"] / peaks["allocated"], 3)
        quantity = f"reserved / allocated, {where}"
        rows.append(row("lowtide", quantity, held, "", "arithmetic"))
        rows.append(row("bar", quantity, HELD_BAR, "", "arithmetic"))
    if NO_GRAPHS in point.changes:  # NCCL is not called where a graph is replayed
        rows += [
            row(
                *(system, f"all-gathers of a step, {where}"),
                *(round(figures["gathered"] * point.ranks / 1e9, 2), "GB", "simulated"),
            )
            for system, figures in found.items()
        ]
    return rows


CASE = Case(
    name=NAME,
    describe="torchtitan 0.3 as it configures Llama 3 8B: `lowtide run` and FSDP2.",
    how="""\
torchtitan's newest release with torch 2.15, its configuration `llama3_8b`: one sequence
of 8,192 tokens a rank, FlexAttention, selective checkpointing, the loss by eight chunks
of tokens, forward and backward in a CUDA graph; only tokens, logging and the number of
steps are ours. On the [driver that computes nothing](design/phantom.md), with torch's
default segments, or on *expandable segments*, which torchtitan's `run_train.sh` sets;
the highest figure of four steps. *all-gathers of a step*: what all ranks give to those
of the last one, which is what each of them receives.

*float8 gathers*: layers but the head in torchao's tensorwise recipe, gathered in
float8, with scales computed in advance. torchtitan 0.2 had options for these; of 0.3 it
is its `Float8Linear` with torchao's configuration, weights wrapped and scales computed
as torchao does, by our program. Embedding, head and norms stay bf16. With the loss by
chunks FSDP2 gathers norm and head, which are one unit in torchtitan, once more than
lowtide does.

Gathered in float8 lowtide reserves 1.58 GiB more than in bf16, with as much allocated:
at the peak, the head's backward, no block is gathered. What is more are holes, 7.30
beside 5.72 GiB when the last segment was asked for (`lowtide plan --snapshot`). In
eager mode torchao casts in fp32, and those copies open 45 segments of 448 MiB, which
activations of 224 MiB and smaller tensors fill less well than the 87 of 224 MiB in
bf16. Expandable segments would spare 3.15 GiB in float8 and 2.15 in bf16.

*whole logits*: torchtitan's loss without the chunks, as its `llama3_debugmodel_ce_loss`
has it, on `spmd_backend="partial_dtensor"`, whose head is an `nn.Linear` with its
class's forward. *deferred logits*: `lowtide run --defer-logits`; a step that made
logits would end the run, and the head's rows are gathered in forward and in backward.
*bar*: what we set out to reach. Two sequences a rank do not fit an H100 with FSDP2.

Missed bars: of what is reserved with deferred logits 18.9 GiB are activations that
selective checkpointing keeps, in both systems and at 128 ranks, too (`lowtide plan`),
where the bar is 22.9 (22.1 on expandable segments). There the embedding's table is read
in halves of 501 MiB, for the latency of smaller ones, which misses 1.06 on default
segments: with all of it gathered in forward 23.8 GiB would be reserved (1.047), and
35.0 at 8 ranks. *compiled*: torchtitan compiles its blocks and its loss, which then
makes no logits in fp32. 14.0 GiB are kept activations there, and at 8 ranks 11.2 shards
and states, where the bars are 23.5 and 13.2.

The loss by chunks has the head's gradient whole in both systems (2 GiB in fp32), and 16
GiB at the peak are activations that selective checkpointing keeps. A graph has memory
of its own, beside gradients of the eager step before it.""",
    run=lambda: [row for point in POINTS for row in rows_at(point)],
    parts={point: partial(rows_at, point) for point in POINTS},
    headlines=tuple(
        f"reserved, torchtitan 0.3, Llama 3 8B, {ranks} ranks, without CUDA graphs, "
        f"{segments}whole logits, deferred logits"
        for ranks in (8, 128)
        for segments in ("", "expandable segments, ")
    ),
)
