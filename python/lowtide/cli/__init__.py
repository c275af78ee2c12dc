"""`python -m lowtide <command>`: one file per command, each with `add_parser`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lowtide.cli import env, phantom, plan, run

COMMANDS = (env, phantom, plan, run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lowtide",
        description="FSDP-style sharded training whose peak memory is planned.",
    )
    subparsers = parser.add_subparsers(metavar="<command>", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    given = list(sys.argv[1:] if arguments is None else arguments)
    of_program: list[str] = []
    if given[:1] == ["run"]:
        given, of_program = run.split(given)
    options, unknown = parser.parse_known_args(given)
    if unknown:
        hint = getattr(options, "hint_at_unknown", "")
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.of_program = of_program
    options.is_script = "--" in given
    status: int = options.run(options)
    return status
