"""`python -m lowtide run`: a program of FSDP2's, unedited, on lowtide."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.integrations.session import Session

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Runs a program that trains with torch's fully_shard, in its own code or in that of a
framework, with lowtide's in its place. Says what it bound, and at the end what the
models held, on the standard error.

  python -m lowtide run [options] train.py ...
  torchrun ... -m lowtide run [options] -m package.train ...
  accelerate launch ... -m lowtide run [options] train.py ...
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "run",
        help="a program of FSDP2's, unedited, on lowtide",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--policy",
        metavar="POLICY",
        help="of activations, for the models' repeated blocks: the fields of "
        "lowtide.ActivationPolicy, as 'offload=input;save=*.attn', or 'recompute'",
    )
    add(
        "--defer-logits",
        nargs="?",
        const="",
        metavar="HEAD",
        help="logits are not made for a cross entropy: see docs/losses.md. The models' "
        "head is found, or named as in --defer-logits=output",
    )
    add(
        "--all-or-nothing",
        action="store_true",
        help="optimizer steps happen on all ranks or on none, and run again where "
        "memory was refused: see docs/frameworks.md",
    )
    add("-m", action="store_true", dest="is_module", help="the program is a module")
    add("program", help="a file, or with -m a module; what follows is its own")
    parser.set_defaults(run=run)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those up to the program, and the program's own, of which argparse would take
    some."""
    at = 1  # behind the command
    while at < len(arguments) and arguments[at].startswith("-"):
        at += 2 if arguments[at] == "--policy" else 1
    # Or argparse would take the program for the head.
    bare = {"--defer-logits": "--defer-logits="}
    ours = [bare.get(argument, argument) for argument in arguments[:at]]
    return [*ours, *arguments[at : at + 1]], list(arguments[at + 1 :])


def run(options: argparse.Namespace) -> int:
    """Raises what the program raises, with its own traceback."""
    words = [options.program, *options.of_program]
    if options.is_module:
        words.insert(0, "-m")
    from lowtide.phantom.dry import as_main

    # `python -m` puts the current folder first, `python train.py` that of the file.
    if not getattr(sys.flags, "safe_path", False) and sys.path:
        del sys.path[0]
    as_main.prepare(words)
    if not options.is_module:
        words[0] = os.path.abspath(words[0])
    _require(options.program, options.is_module)
    session = _begin(options)
    try:
        as_main.run(words)
    except BaseException as error:
        _hide_frames_above(error)
        if not _is_good_end(error):
            raise
    finally:
        _conclude(session)
    return _status(session, options.policy)


def _begin(given: argparse.Namespace) -> Session:
    from lowtide.integrations import session, spawned

    options = session.Options(given.policy, given.defer_logits, given.all_or_nothing)
    try:
        begun = session.Session(options)
    except ValueError as error:
        raise SystemExit(_usage(str(error))) from None
    spawned.bind_in_children(session.enter, options)
    if begun.is_rank_0:
        places = ", ".join(begun.binding.places)
        print(f"lowtide: run: fully_shard is lowtide's in {places}", file=sys.stderr)
    return begun


def _conclude(session: Session) -> None:
    session.report()
    if session.is_rank_0 and not session.has_sharded:
        print(
            "lowtide: run: expected a call of fully_shard, got none in this process: "
            "lowtide sharded nothing here. Processes of multiprocessing report for "
            "themselves; a launcher of programs has to launch lowtide, as in "
            "`accelerate launch -m lowtide run train.py`.",
            file=sys.stderr,
            flush=True,
        )


def _is_good_end(error: BaseException) -> bool:
    """As under ``sys.exit(main())``, whose main returns nothing."""
    if not isinstance(error, SystemExit):
        return False
    return error.code is None or (isinstance(error.code, int) and error.code == 0)


def _status(session: Session, policy: str | None) -> int:
    """Of a program that ended well."""
    if policy is None or session.num_blocks or not session.has_sharded:
        return 0
    return _usage(
        f"lowtide: run: --policy: expected a model that ran a forward, got none that "
        f"{policy!r} could be given to. Leave the option out."
    )


def _require(program: str, is_module: bool) -> None:
    if is_module:
        try:
            found = importlib.util.find_spec(program) is not None
        except ModuleNotFoundError:  # a package above it
            found = False
        expected = "a module that can be imported"
    else:
        found = Path(program).exists()
        expected = "a Python file"
    if not found:
        raise SystemExit(
            _usage(
                f"lowtide: run: expected {expected}, got {program!r}. Check the name, "
                f"and the folder, {os.getcwd()}."
            )
        )


def _usage(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


def _hide_frames_above(error: BaseException) -> None:
    """Tracebacks begin with the program, as the interpreter prints them; whoever
    prints them, the program's own hook included."""
    from lowtide.phantom.dry import as_main

    theirs, starter = sys.excepthook, as_main.run.__code__.co_filename

    def show(
        kind: type[BaseException], raised: BaseException, entry: TracebackType | None
    ) -> None:
        begin = entry if raised is error else None
        while begin is not None and begin.tb_frame.f_code is not as_main.run.__code__:
            begin = begin.tb_next
        if begin is None:
            begin = entry
        while begin is not None and begin.tb_frame.f_code.co_filename == starter:
            begin = begin.tb_next
        theirs(kind, raised.with_traceback(begin), begin)

    sys.excepthook = show
