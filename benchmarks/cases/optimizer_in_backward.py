"""A Llama step whose optimizer steps in backward, simulated, beside one behind it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from case import Case, Row, rows_of
from points import Each, Points

NAME = "optimizer_in_backward"
GIB = 1 << 30
BAR = 14.0  # GiB, what we set out to reach
SETTING = ("--system", "lowtide", "--config", "8b", "--world", "8")
HOWS: dict[str, tuple[str, ...]] = {
    "behind the backward, clipped": (),
    "in backward, not clipped": ("--in-backward", "unclipped"),
    "in backward, clip late": ("--in-backward", "late"),
    "in backward, clip exact": ("--in-backward", "exact"),
    "behind the backward, clipped, states on the host": ("--states-on-host",),
    "in backward, not clipped, states on the host": (
        *("--in-backward", "unclipped"),
        "--states-on-host",
    ),
    "in backward, clip exact, states on the host": (
        *("--in-backward", "exact"),
        "--states-on-host",
    ),
    "in backward, not clipped, parameters on the host": (
        *("--in-backward", "unclipped"),
        *("--parameters-on-host", "--step-on-device", "device"),
    ),
    "in backward, not clipped, parameters and states on the host": (
        *("--in-backward", "unclipped"),
        *("--parameters-on-host", "--step-on-device", "host"),
    ),
}
INPUTS = {
    "blocks' inputs on the device": (),
    "blocks' inputs offloaded": ("--checkpoint", "offloaded"),
}
SEGMENTS = {"default": (), "expandable": ("--expandable",)}
MUONS = ("lowtide", "torch")
WHERE = "8B, 8 ranks, s 8192"


def measure() -> list[Row]:
    memory = Points("llama_memory.py", timeout=3600)
    time = Points("llama_time.py", timeout=3600)
    return [
        *memory.all_of(lambda each: list(memory_rows(each))),
        *time_rows(time.each),
        *muon_rows(memory.each, time.each),
    ]


def memory_rows(each: Each) -> Iterator[Row]:
    row = rows_of(NAME)
    variants = list(product(INPUTS, SEGMENTS, HOWS))
    runs = [
        (*SETTING, "--loss", "vocabulary", *INPUTS[i], *SEGMENTS[s], *HOWS[h])
        for i, s, h in variants
    ]
    for (inputs, segments, how), figures in zip(variants, each(runs), strict=True):
        steady = figures["steady"]
        quantity = f"reserved, {WHERE}, {segments} segments, {inputs}: {how}"
        note = f"allocated {round(steady['allocated'] / GIB, 2)}"
        reserved = round(steady["reserved"] / GIB, 2)
        yield row("lowtide", quantity, reserved, "GiB", "simulated", note)
        if how.startswith("in backward"):
            yield row("bar", quantity, BAR, "GiB", "arithmetic")


def time_rows(each: Each) -> Iterator[Row]:
    row = rows_of(NAME)
    runs = [(*SETTING, "--loss", "tokens", *how) for how in HOWS.values()]
    for how, figures in zip(HOWS, each(runs), strict=True):
        milliseconds = round(figures["step"]["seconds"] * 1e3, 1)
        quantity = f"step, 8B, 8 ranks, H100: {how}"
        yield row("lowtide", quantity, milliseconds, "ms", "simulated")


def muon_rows(memory: Each, time: Each) -> Iterator[Row]:
    row = rows_of(NAME)
    runs = [(*SETTING, "--loss", "tokens", "--muon", whose) for whose in MUONS]
    for whose, of_memory, of_time in zip(MUONS, memory(runs), time(runs), strict=True):
        milliseconds = round(of_time["phases"]["optimizer"]["seconds"] * 1e3, 1)
        exposed = round(of_time["phases"]["optimizer"]["exposed"] * 1e3, 1)
        note = f"exposed communication {exposed} ms"
        quantity = f"Muon's step, clipped, 8B, 8 ranks, H100: {whose}'s"
        yield row("lowtide", quantity, milliseconds, "ms", "simulated", note)
        allocated = of_memory["steady"]["moments"]["optimizer"]["allocated"]
        quantity = f"allocated in Muon's step, {WHERE}: {whose}'s"
        yield row("lowtide", quantity, round(allocated / GIB, 2), "GiB", "simulated")


CASE = Case(
    name=NAME,
    describe="A Llama step whose optimizer steps in backward, simulated.",
    how="""\
`programs/llama_memory.py` and `llama_time.py` as in memory_llama and time_llama, with
`lowtide.optimize_in_backward`; fused AdamW, loss over rows of the head (memory) and by
chunks of tokens (time). *Clip exact* has the bits of clipping behind the backward:
gradients wait in page-locked host memory, 3.7 GiB a rank by arithmetic, and `step()`
brings them back unit by unit, behind nothing that would hide it. *Clip late* scales by
the norm of the step before.

The bar is missed with parameters and states on the device: they are 11.2 GiB by
arithmetic, inputs of 32 blocks 2.0, and the rest is one block's backward: what it
recomputes, two gathered blocks, its gradients in bf16 and the ring. Without any
gradient the forward alone has 14.9 GiB; with blocks' inputs offloaded 0.2 to 0.9 are
missing. *States on the host* is `lowtide.offload_states`: 7.5 GiB by arithmetic, in and
out in every step. *Parameters on the host* is `CPUOffloadPolicy` with
`lowtide.step_on_device`, 3.7 GiB: in for each gather and for the step, out behind it;
each gradient goes out and comes in again. With states on the device that meets the bar
on expandable segments (on default ones it misses it by 0.1 with inputs on the device).

Reserved is 1.02 to 1.07 of allocated on expandable segments, and 1.10 where all else is
on the host, of 4.0 GiB. On default ones it is 1.06 to 1.11 with states on the device
(memory_llama says of what), 1.20 to 1.26 with states on the host, and 1.38 and 1.46
with parameters there, too: behind the backward states of embedding and head, 501 MiB
each, open a segment where free ones have 418 at most; in backward all copies for a step
lie in segments of the stream that steps, 1.4 to 2.0 GiB that serve no other.

Muon has the blocks' matrices, fused AdamW what is left; its step's time is from the
clipping on.""",
    run=measure,
    parts={"all": measure},
    only_by_name="twenty-six simulated runs take a quarter of an hour",
)
