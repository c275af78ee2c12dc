"""Step time and exposed communication of a Llama, simulated, beside FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from case import Case, Row, rows_of
from points import Each, Points

NAME = "time_llama"
GPU = "h100"
SYSTEMS = ("lowtide", "fsdp2")
ONE = "lowtide, one communicator"
PHASES = ("forward", "loss", "backward", "optimizer")
NAMES = {
    "exposed": "exposed communication",
    "communication": "communication",
    "seconds": "step",
}
# What we set out to reach, of FSDP2's.
BARS = {"exposed": 1.0, "communication": 1.05}

Times = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    config: str = "8b"
    world: int = 8
    microbatches: int = 1
    loss: str = "plain"
    replicas: int = 1
    link: int | None = None  # GB/s between nodes, if not those of the GPU's machines
    ranks_per_node: int = 8
    sequence: int = 8192

    def __str__(self) -> str:
        parts = [f"{self.config.upper()}, {self.world} ranks"]
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} microbatches without sync")
        if self.loss != "plain":
            parts.append("loss by chunks of tokens")
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        if self.link is not None:
            parts.append(f"{self.link} GB/s between nodes")
        if self.ranks_per_node == 1:
            parts.append("a node each")
        if self.sequence != 8192:
            parts.append(f"sequence {self.sequence}")
        return ", ".join([*parts, GPU.upper()])

    @property
    def arguments(self) -> tuple[str, ...]:
        return (
            *("--config", self.config),
            *("--world", str(self.world)),
            *("--microbatches", str(self.microbatches)),
            *("--replicas", str(self.replicas)),
            *("--sequence", str(self.sequence)),
            *("--ranks-per-node", str(self.ranks_per_node)),
            *(("--link", str(self.link)) if self.link is not None else ()),
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
    Setting(world=256, replicas=32),
    Setting(world=64, link=20),
    Setting(world=8, link=20, ranks_per_node=1),
    Setting(world=8, link=20, ranks_per_node=1, sequence=16384),
)


def measure() -> list[Row]:
    return [row for rows in PARTS.values() for row in rows()]


def rows_alone(setting: Setting) -> Iterator[Row]:
    points = Points("llama_time.py", gpu=GPU, timeout=1800)
    yield from rows_for(setting, points.each)


PARTS = {str(setting): partial(rows_alone, setting) for setting in SETTINGS}


def rows_for(setting: Setting, each: Each) -> Iterator[Row]:
    losses = setting.losses()
    arguments = [
        ("--system", system, "--loss", loss, *setting.arguments)
        for system, loss in losses.items()
    ]
    *both, shared = each([*arguments, (*arguments[0], "--shared")])
    found: dict[str, Times] = dict(zip(losses, both, strict=True))
    row = rows_of(NAME)
    for system, times in found.items():
        step, phases = times["step"], times["phases"]
        by_phase = "; ".join(
            f"{name} {ms(phases[name]['seconds'])} ms, exposed "
            f"{ms(phases[name]['exposed'])}"
            for name in PHASES
        )
        calls = calls_and_bytes(times["collectives"], times["collective_bytes"])
        notes = {
            "exposed": by_phase,
            "communication": calls,
            "seconds": f"compute stream busy {ms(step['compute'])} ms",
        }
        for kind, name in NAMES.items():
            quantity = f"{name}, {setting}"
            value = ms(step[kind])
            yield row(system, quantity, value, "ms", "simulated", notes[kind])
    seconds = ms(shared["step"]["seconds"])
    yield row(ONE, f"step, {setting}", seconds, "ms", "simulated")
    for kind, name in NAMES.items():
        quantity = f"of FSDP2's {name}, {setting}"
        share = found["lowtide"]["step"][kind] / found["fsdp2"]["step"][kind]
        yield row("lowtide", quantity, round(share, 3), "", "simulated")
        if kind in BARS:
            yield row("bar", quantity, BARS[kind], "", "arithmetic")


def calls_and_bytes(calls: dict[str, int], sizes: dict[str, float]) -> str:
    return ", ".join(
        f"{n} {kind} of {sizes[kind] / 1e9:.1f} GB" for kind, n in calls.items()
    )


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


CASE = Case(
    name=NAME,
    describe="Time of a Llama step, simulated, beside FSDP2.",
    how="""\
`programs/llama_time.py`: the third step on the [phantom's clock](time.md), rank 0,
batch 1, sequence 8192, full checkpointing, bf16 compute, fp32 reduction, fused AdamW,
gradients clipped; both systems with their default settings, blocks, embedding and head
units of their own; a head that FSDP2 applies to chunks is held from the first to the
last. What an H200 took beside this clock:
[gpu_check.md](gpu_check.md).

*exposed*: a collective runs while the compute stream waits for another stream. *loss*
is the head and the loss. What is assumed is in [time.md](time.md). *bar*: what we set
out to reach.

FSDP2 beside lowtide is computed by the same rules. *One communicator*: lowtide under
`LOWTIDE_COMMUNICATORS=shared`. *Communication*: a collective runs; bytes
are of full buffers.

Missed bars. Exposed at 64 and 256 ranks: in forward the first block's gather is hidden
by the copies that FSDP2 makes of what it gathered before and lowtide does not; they are
in its longer step. At the end of backward the embedding's gradient leaves in a few
chunks, FSDP2's in one, which shows at 256. With the loss by chunks of tokens the head's
gradient is there as soon as backward begins, and the first block waits until most of it
has left. *32 replicas* are of 8 shards, a node each: both systems sum a unit's
gradients over them in one all-reduce. *A node each*: eight nodes of one GPU, or eight
GPUs on PCIe. There the third step's gathers in
backward leave by the first steps' time stamps: by arithmetic alone, which assumes
NVLink among 8 ranks, the step of 16,384 tokens took 3,634 ms.""",
    run=measure,
    parts=PARTS,
    headlines=tuple(
        f"{what}, {setting}"
        for what in ("exposed communication", "step")
        for setting in SETTINGS[1:2]
    ),
    only_by_name="two dozen simulated runs take minutes",
)
