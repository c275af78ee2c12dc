"""CPU seconds that `import lowtide` adds to `import torch`."""

from __future__ import annotations

import statistics
import subprocess
import sys

from case import Case, Row, rows_of

NAME = "import_time"
REPEATS = 7
STATEMENTS = {
    "import torch": "import torch",
    "import lowtide": "import lowtide",
    "first fully_shard": "from lowtide import fully_shard",
}

# CPU time of this process and its threads: blind to what else the machine does.
PROGRAM = """
import time
for statement in {statements!r}:
    start = time.process_time()
    exec(statement)
    print(time.process_time() - start)
"""


def measure() -> list[Row]:
    """Median of each statement, run in this order in a new process."""
    row = rows_of(NAME)
    program = PROGRAM.format(statements=list(STATEMENTS.values()))
    runs = [run(program) for _ in range(REPEATS + 1)][1:]  # the first warms caches
    medians = [
        round(statistics.median(column), 4) for column in zip(*runs, strict=True)
    ]
    return [
        row("lowtide", f"{name}, CPU time", seconds, "s", "measured")
        for name, seconds in zip(STATEMENTS, medians, strict=True)
    ] + [row("aim", "import lowtide, CPU time", 0.3, "s", "arithmetic")]


def run(program: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return [float(line) for line in done.stdout.split()]


CASE = Case(
    name=NAME,
    describe="What `import lowtide` adds to `import torch`.",
    how="""\
CPU time of a new process and its threads, median of 7. What `fully_shard` needs of
torch (FSDP, DTensor) is loaded on its first use and stands beside it.""",
    run=measure,
)
