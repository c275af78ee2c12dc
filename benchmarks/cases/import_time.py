"""CPU seconds that `import lowtide` adds to `import torch`, as JSON.

The aim is < 0.3 s.  What is loaded on first use (`lowtide.fully_shard` needs torch's
FSDP and DTensor) is reported beside it.
"""

import argparse
import json
import statistics
import subprocess
import sys

STATEMENTS = {
    "torch": "import torch",
    "lowtide": "import lowtide",
    "fully_shard": "from lowtide import fully_shard",
}

# CPU time of this process and its threads: blind to what else the machine does.
PROGRAM = """
import time
for statement in {statements!r}:
    start = time.process_time()
    exec(statement)
    print(time.process_time() - start)
"""


def measure(repeats: int) -> dict[str, float]:
    """Median CPU seconds of each statement, run in this order in a new process."""
    program = PROGRAM.format(statements=list(STATEMENTS.values()))
    runs = [run(program) for _ in range(repeats + 1)][1:]  # the first warms caches
    return {
        f"{name}_cpu_s": round(statistics.median(column), 4)
        for name, column in zip(STATEMENTS, zip(*runs, strict=True), strict=True)
    }


def run(program: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return [float(line) for line in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print(json.dumps({"case": "import_time", **measure(options.repeats)}))


if __name__ == "__main__":
    main()
