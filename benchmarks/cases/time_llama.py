"""Step time and exposed communication of a Llama, simulated, beside FSDP2."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from case import Case, Row, rows_of
from launch import run

from lowtide.phantom.dry.launch import Machine

NAME = "time_llama"
SYSTEMS = ("lowtide", "fsdp2")
PHASES = ("forward", "loss", "backward", "optimizer")

Times = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    config: str = "8b"
    world: int = 8
    microbatches: int = 1
    loss: str = "plain"
    accelerator: str = "h100"

    def __str__(self) -> str:
        parts = [f"{self.config.upper()}, {self.world} ranks"]
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} microbatches without sync")
        if self.loss != "plain":
            parts.append("loss by chunks of tokens")
        return ", ".join([*parts, self.accelerator.upper()])

    @property
    def arguments(self) -> tuple[str, ...]:
        return (
            *("--config", self.config),
            *("--world", str(self.world)),
            *("--microbatches", str(self.microbatches)),
        )

    def losses(self) -> dict[str, str]:
        """Both systems gather the head once; each chunks in its own way."""
        if self.loss == "plain":
            return dict.fromkeys(SYSTEMS, "plain")
        return {"lowtide": "tokens", "fsdp2": "chunked:8"}


SETTINGS = (
    Setting(world=8),
    Setting(world=64),
    Setting(world=256),
    Setting(world=64, loss="tokens"),
)


def measure() -> list[Row]:
    with ThreadPoolExecutor(max_workers=2) as threads:
        return [row for setting in SETTINGS for row in rows_for(setting, threads)]


def times_of(setting: Setting, arguments: Sequence[str]) -> Times:
    machine = Machine(gpu=setting.accelerator, world=setting.world)
    times: Times = json.loads(
        run("llama_time.py", *arguments, machine=machine, timeout=1800)
    )
    return times


def rows_for(setting: Setting, threads: ThreadPoolExecutor) -> Iterator[Row]:
    losses = setting.losses()
    arguments = [
        ("--system", system, "--loss", loss, *setting.arguments)
        for system, loss in losses.items()
    ]
    found = dict(
        zip(losses, threads.map(partial(times_of, setting), arguments), strict=True)
    )
    row = rows_of(NAME)
    for system, times in found.items():
        step, phases = times["step"], times["phases"]
        by_phase = "; ".join(
            f"{name} {ms(phases[name]['seconds'])} ms, exposed "
            f"{ms(phases[name]['exposed'])}"
            for name in PHASES
        )
        calls = ", ".join(f"{n} {kind}" for kind, n in times["collectives"].items())
        exposed = ms(step["exposed"])
        quantity = f"exposed communication, {setting}"
        yield row(system, quantity, exposed, "ms", "simulated", by_phase)
        yield row(
            system,
            f"step, {setting}",
            ms(step["seconds"]),
            "ms",
            "simulated",
            f"compute stream busy {ms(step['compute'])} ms, communication "
            f"{ms(step['communication'])}; {calls}",
        )
    for kind in ("exposed", "seconds"):
        name = {"exposed": "exposed communication", "seconds": "step"}[kind]
        quantity = f"of FSDP2's {name}, {setting}"
        share = found["lowtide"]["step"][kind] / found["fsdp2"]["step"][kind]
        yield row("lowtide", quantity, round(share, 3), "", "simulated")
        if kind == "exposed":
            yield row("bar", quantity, 1.0, "", "arithmetic")


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


CASE = Case(
    name=NAME,
    describe="Time of a Llama step, simulated, beside FSDP2.",
    how="""\
`programs/llama_time.py`: the third step on the [phantom's clock](time.md), rank 0, batch 1, sequence 8192, full checkpointing, bf16 compute, fp32
reduction, fused AdamW, gradients clipped; both systems with their default settings,
blocks, embedding and head units of their own; a head that FSDP2 applies to chunks is
held from the first to the last. Nothing was measured on a GPU.

*exposed*: a collective runs while the compute stream waits for another stream.
*loss* is the head and the loss. Assumed: 70 % of the peak in products, 35 % in
attention, 90 % of the memory's bandwidth, 5 us of the host for each operator,
collectives as NCCL's tuning model has them on DGX nodes (NVLink 4, one 400 Gb/s card a
GPU), and streams that do not slow each other down. *bar*: what we set out to reach.

Where lowtide exposes more, its steps are shorter all the same. In forward the first
block's gather is hidden by the copies that FSDP2 makes of what it gathered before and
lowtide does not: 0.8 to 1.1 ms. At 256 ranks the embedding's gradient leaves in five
collectives, whose latency is 0.5 ms each, instead of one: longer chunks would take the
difference away (two of 1 GiB were tried, 13.5 ms), but their bytes would be the step's
peak of reserved memory. With the loss by chunks of tokens the head's gradient is there
as soon as backward begins, with no product left to hide it: compute waits 4.3 ms (64
ranks) until its 1 GiB has been copied into the ring, and only then computes the last
block again; else it would be in the peak. To gather that block during the loss was
tried and changes nothing.""",
    run=measure,
    headlines=tuple(
        f"{what}, {setting}"
        for what in ("exposed communication", "step")
        for setting in SETTINGS[:3]
    ),
    only_by_name="eight simulated runs take minutes",
)
