"""`python -m lowtide phantom`: any program on GPUs that compute nothing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.phantom.dry import launch
    from lowtide.phantom.dry.ranks import Outcome

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Runs a program on torch's own CUDA build over a driver that computes nothing: memory is
what GPUs would have reserved, values are not computed. No GPU is needed or touched.

  python -m lowtide phantom [options] -- train.py ...
  python -m lowtide phantom [options] -- -m package.train ...
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "phantom",
        help="any program on GPUs that compute nothing",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", nargs="+", help="-- and a file or -m module")
    add_machine(parser)
    add = parser.add_argument
    add("--devices", type=int, metavar="N", help="GPUs it sees; default up to 8")
    add("--json", metavar="FILE", help="what it took; - is the standard output")
    add("--snapshot", metavar="FILE", help="for https://pytorch.org/memory_viz")
    parser.set_defaults(run=run)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """What a program runs on, and what is assumed of its values."""
    add = parser.add_argument
    add("--gpu", default="h100", help="such as h100 (default), a100-80, rtx4090")
    add("--world", type=int, metavar="N", help="ranks, as under torchrun; default 1")
    add("--rank", type=int, default=0, metavar="R", help="which one runs; default 0")
    add("--ranks", metavar="R,R", help="several, or all; compares their calls of NCCL")
    add("--device-memory", metavar="SIZE", help="of a GPU, if not its own, as 80GiB")
    add("--events", choices=("immediate", "at_sync"), default="immediate")
    add(
        "--nonzero",
        type=_share,
        metavar="SHARE",
        help="of all elements, in sizes that depend on data; default 1, and of what "
        "routers choose an equal share",
    )
    add(
        "--limit",
        type=_seconds,
        metavar="SECONDS",
        help="a program that runs longer is ended, and said where it was",
    )


def require_one_rank(command: str, options: argparse.Namespace, *names: str) -> None:
    """Options that several ranks, which were asked for, do not have."""
    for name in names:
        if getattr(options, name):
            raise ValueError(
                f"lowtide: {command} --{name}: expected one rank, got --ranks. Leave "
                "one of the two out."
            )


def _seconds(text: str) -> float:
    """For argparse, which turns the error into its own."""
    found = float(text) if text.replace(".", "", 1).isdigit() else 0.0
    if found <= 0:
        raise argparse.ArgumentTypeError(
            f"expected seconds above 0, got {text!r}. Leave the option out for none."
        )
    return found


def _share(text: str) -> float:
    """For argparse, as :func:`_seconds`."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(
            f"expected a share of all elements, 0 to 1, got {text!r}."
        )
    return found


def run(options: argparse.Namespace) -> int:
    from lowtide.phantom.dry import launch
    from lowtide.planning.report import parse_bytes

    settings = launch.Settings(
        nonzero=options.nonzero,
        report=options.json,
        snapshot=options.snapshot,
        limit=options.limit,
    )
    memory = options.device_memory
    try:
        machine = launch.Machine(
            gpu=options.gpu,
            devices=options.devices,
            memory=None if memory is None else parse_bytes(memory),
            events=options.events,
            world=options.world,
            rank=options.rank,
        )
        if options.ranks is not None:
            return _run_ranks(options, machine, settings)
        return launch.run(options.program, machine, settings)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2


def _run_ranks(
    options: argparse.Namespace, machine: launch.Machine, settings: launch.Settings
) -> int:
    from lowtide.phantom.dry import ranks

    require_one_rank("phantom", options, "snapshot")
    asked = ranks.parse(options.ranks, machine.world or 1)
    outcomes, verdict = ranks.run_programs(options.program, machine, settings, asked)
    for outcome in outcomes:
        print(_row(outcome), file=sys.stderr)
    print(verdict, file=sys.stderr)
    for divergence in verdict.divergences:
        print(divergence, file=sys.stderr)
    failed = [outcome for outcome in outcomes if outcome.status]
    for outcome in failed:
        printed = f"It printed last:\n{outcome.output}" if outcome.output else ""
        complaint = outcome.complaint.removeprefix("lowtide: phantom: ") or (
            f"expected the program to end with status 0, got {outcome.status}."
        )
        print(
            f"lowtide: phantom: rank {outcome.rank}: {complaint} {printed}".rstrip(),
            file=sys.stderr,
        )
    if options.json:
        reports = {str(outcome.rank): outcome.report for outcome in outcomes}
        text = json.dumps({"ranks": reports, "nccl": verdict.to_dict()}, indent=1)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    return 1 if failed or verdict.divergences else 0


def _row(outcome: Outcome) -> str:
    """``rank 1: reserved 1.25 GiB, allocated 1.02 GiB``"""
    from lowtide.planning.report import gib

    devices = outcome.report["devices"] if outcome.report else []
    parts = [
        f"reserved {gib(each['reserved'])}, allocated {gib(each['allocated'])}"
        for each in devices
    ]
    return f"rank {outcome.rank}: {'; '.join(parts) or 'no memory of a GPU'}"
