"""`python -m lowtide phantom`: any program on GPUs that compute nothing."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    add = parser.add_argument
    add("--gpu", default="h100", help="such as h100 (default), a100-80, rtx4090")
    add("--world", type=int, metavar="N", help="ranks, as under torchrun; default 1")
    add("--rank", type=int, default=0, metavar="R", help="which one runs; default 0")
    add("--devices", type=int, metavar="N", help="GPUs it sees; default up to 8")
    add("--device-memory", metavar="SIZE", help="of a GPU, such as 80GiB")
    add("--events", choices=("immediate", "at_sync"), default="immediate")
    add(
        "--nonzero",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of all elements, in sizes that depend on data; default 1",
    )
    add("--json", metavar="FILE", help="what it took; - is the standard output")
    add("--snapshot", metavar="FILE", help="for https://pytorch.org/memory_viz")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from lowtide.phantom.dry import launch
    from lowtide.planning.report import parse_bytes

    machine = launch.Machine(
        gpu=options.gpu,
        devices=options.devices,
        memory=parse_bytes(options.device_memory) if options.device_memory else None,
        events=options.events,
        world=options.world,
        rank=options.rank,
    )
    settings = launch.Settings(
        nonzero=options.nonzero, report=options.json, snapshot=options.snapshot
    )
    try:
        return launch.run(options.program, machine, settings)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
