"""`python -m lowtide <command>`: one file per command, each with `add_parser`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lowtide.cli import env

COMMANDS = (env,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lowtide",
        description="FSDP-style sharded training whose peak memory is planned.",
    )
    subparsers = parser.add_subparsers(metavar="<command>", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status
