"""What `make test-all` has beyond `make test`: the slow tests, in shards.

    tests/shards.py                       all
    tests/shards.py NAME ...              these
    tests/shards.py --list
    tests/shards.py --minutes 50 --turn N as many as fit, beginning where turn N begins:
                                          first `make test` with an older torch

Each shard's duration below is what two cores take, or more. With `--minutes` one starts
only if its duration fits with half as much again, and is ended where the time is over:
continuous integration never fails for lack of time, and what did not run is said. Exit
status 1 if a shard failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLACK = 1.5


@dataclass(frozen=True)
class Shard:
    name: str
    minutes: float  # on two cores
    command: tuple[str, ...]
    # Whether continuous integration runs it; else `make test-all` alone does.
    takes_turns: bool = True


def pytest_shard(
    name: str, minutes: float, *, jobs: int = 2, takes_turns: bool = True
) -> Shard:
    options = ("-q", "-n", str(jobs), "--dist", "loadfile", "--slow-shard", name)
    command = (sys.executable, "-m", "pytest", *options)
    return Shard(name, minutes, command, takes_turns)


def sanitized(
    name: str, minutes: float, *, rooms: Sequence[str] = (), takes_turns: bool = True
) -> Shard:
    """The C++ tests, or those of ``rooms``, in a build of their own."""
    command = ("make", "sanitize", f"SANITIZE={name}")
    if rooms:
        command = (*command, f"ROOMS={' '.join(rooms)}")
    return Shard("-".join((name, *rooms)), minutes, command, takes_turns)


def older_torch(version: str) -> Shard:
    """`make test` with another torch than the one that is developed with."""
    command = ("make", "test", f"TORCH={version}")
    return Shard(f"torch-{version}", 28, command)


OLDER = tuple(map(older_torch, ("2.11", "2.12", "2.13", "2.14")))
SHARDS = (
    *(pytest_shard(f"dist-{i}", minutes) for i, minutes in enumerate((5, 5, 10), 1)),
    pytest_shard("rest", 6),
    pytest_shard("phantom", 8),
    pytest_shard("faults", 4),
    pytest_shard("soak", 10, jobs=0),
    pytest_shard("frameworks", 12, jobs=0),
    pytest_shard("install", 10, jobs=0),
    pytest_shard("unity", 10, jobs=0),
    pytest_shard("figures", 30, jobs=0, takes_turns=False),
    sanitized("address", 12),
    # What has threads, but for ranks that are threads.
    sanitized("thread", 8, rooms=("comm", "device", "memory", "ops")),
    sanitized("thread", 30, takes_turns=False),
)


def in_turn(shards: Sequence[Shard], turn: int) -> list[Shard]:
    """Those that take turns, beginning one further each turn."""
    shards = [shard for shard in shards if shard.takes_turns]
    first = turn % len(shards)
    return [*shards[first:], *shards[:first]]


def run(shard: Shard, seconds: float) -> str:
    """What became of it; its output goes where ours does."""
    process = subprocess.Popen(shard.command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return "cut off: no time left"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return "passed" if status == 0 else f"failed: exit status {status}"


def run_all(shards: Sequence[Shard], minutes: float) -> dict[str, str]:
    """What became of each."""
    ends = time.monotonic() + 60 * minutes
    became = {}
    for shard in shards:
        left = ends - time.monotonic()
        if 60 * SLACK * shard.minutes > left:
            became[shard.name] = f"not run: takes {shard.minutes:.0f} minutes"
            continue
        print(f"-- shard {shard.name}, about {shard.minutes:.0f} minutes", flush=True)
        began = time.monotonic()
        result = run(shard, left)
        took = (time.monotonic() - began) / 60
        became[shard.name] = f"{result}, {took:.1f} minutes"
    return became


def main(arguments: Sequence[str] | None = None) -> int:
    by_name = {shard.name: shard for shard in (*SHARDS, *OLDER)}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--turn", type=int)
    options = parser.parse_args(arguments)
    if options.list:
        for shard in by_name.values():
            print(f"{shard.name:<30}{shard.minutes:>5.0f} minutes")
        return 0
    if unknown := sorted(set(options.name) - set(by_name)):
        parser.error(f"expected {', '.join(by_name)}, got {', '.join(unknown)}")
    if options.turn is None:
        wanted = [by_name[name] for name in options.name] or SHARDS
    else:
        older = OLDER[options.turn % len(OLDER)]
        wanted = [older, *in_turn(SHARDS, options.turn)]
    became = run_all(wanted, options.minutes)
    print("\nShards of make test-all:")
    for name, result in sorted(became.items()):
        print(f"  {name:<30} {result}")
    return any("failed" in result for result in became.values())


if __name__ == "__main__":
    sys.exit(main())
