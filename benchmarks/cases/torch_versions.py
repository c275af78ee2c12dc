"""Peak reserved memory of a Llama step with each of torch's versions, simulated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from case import Case, Row, rows_of
from points import Points

from cases.memory_llama import ALLOCATORS, GIB
from lowtide._torch_version import VERSION

NAME = "torch_versions"
STORED = Path(__file__).parents[1] / "results" / f"{NAME}.json"
SHAPE = ("--config", "8b", "--world", "8")
RUNS = {
    ("fsdp2", "loss by chunks of tokens"): "chunked:32",
    ("lowtide", "loss by chunks of tokens"): "chunked:32",
    ("lowtide", "loss over rows of the head"): "vocabulary",
}


def name_of(version: tuple[int, ...]) -> str:
    return "torch " + ".".join(map(str, version))


def rows_here() -> list[Row]:
    """Of the torch that runs this."""
    points = Points("llama_memory.py", timeout=3600)
    found = []
    for allocator, flags in ALLOCATORS.items():
        runs = [
            ("--system", system, "--loss", loss, *SHAPE, *flags)
            for (system, _), loss in RUNS.items()
        ]
        reserved = [figures["steady"]["reserved"] for figures in points.each(runs)]
        found += rows_for(allocator, dict(zip(RUNS, reserved, strict=True)))
    return found


def rows_for(allocator: str, reserved: dict[tuple[str, str], int]) -> Iterator[Row]:
    row = rows_of(NAME)
    theirs = reserved["fsdp2", "loss by chunks of tokens"]
    for loss in dict.fromkeys(loss for _, loss in reserved):
        ours = reserved["lowtide", loss]
        where = f"{allocator} segments, {loss}, {name_of(VERSION)}"
        for system, value in (("lowtide", ours), ("fsdp2", theirs)):
            gib = round(value / GIB, 2)
            yield row(system, f"reserved, {where}", gib, "GiB", "simulated")
        share = round(ours / theirs, 3)
        yield row("lowtide", f"of FSDP2's reserved, {where}", share, "", "simulated")


def measure() -> list[Row]:
    """And those that another torch has left, in the order of versions."""
    others = json.loads(STORED.read_text())["rows"] if STORED.exists() else []
    rows = [
        *rows_here(),
        *(Row(**row) for row in others if not row["quantity"].endswith(HERE)),
    ]
    return sorted(rows, key=lambda row: minor_of(row.quantity))


def minor_of(quantity: str) -> int:
    return int(quantity.rpartition(".")[2])


HERE = name_of(VERSION)
CASE = Case(
    name=NAME,
    describe="Peak reserved memory of a Llama step with each torch, simulated.",
    how="""\
The 8B step of memory_llama at 8 ranks (sequence 8192, full checkpointing), FSDP2 and
lowtide of the same torch, with the environment of each version of torch
(`make dev TORCH=2.13`, then `.venv-2.13/bin/python benchmarks/run.py torch_versions`).
FSDP2's loss is by 32 chunks of tokens in both rows. 2.15 returns the workspaces of
products; what else differs is torch's. A run adds the rows of its torch, and keeps the
others: below is said what the last one was obtained with.""",
    run=measure,
    parts={HERE: rows_here},
)
