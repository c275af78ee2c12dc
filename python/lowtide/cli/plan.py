"""`python -m lowtide plan`: peak memory of a training program, without a GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.cli.phantom import add_machine, require_one_rank

if TYPE_CHECKING:
    from lowtide.planning.report import Plan
    from lowtide.planning.request import Request, Script

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Runs a training program on torch's own CUDA over a driver that computes nothing, and
says what it takes on one GPU and what for. No GPU is needed or touched.

  python -m lowtide plan [options] MODEL.py        a file with plan_model (docs/plan.md)
  python -m lowtide plan [options] -- TRAIN.py ... a training script, as it stands
"""

_OF_MODEL_FILES = (
    *("config", "system", "sequence", "batch", "checkpoint", "loss", "microbatches"),
)
_OF_ONE_RANK = ("rank", "timeline", "snapshot", "trace", "verify")
# What starts scripts, each rank in a process of its own.
_LAUNCHERS = (
    *("python", "python3", "torchrun", "accelerate", "deepspeed", "mpirun", "srun"),
    *(
        "torch.distributed.run",
        "torch.distributed.launch",
        "accelerate.commands.launch",
    ),
)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="peak memory of a training program, without a GPU",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="a model file, or -- and a script")
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    add_machine(parser)
    add = parser.add_argument
    add("--steps", type=int, default=3, metavar="N", help="optimizer steps; default 3")
    add(
        "--allocator",
        metavar="CONF",
        help="expandable, or as PYTORCH_ALLOC_CONF; default: what the environment has",
    )
    outputs = parser.add_argument_group("output")
    add = outputs.add_argument
    add("--json", metavar="FILE", help="everything, for programs")
    add("--timeline", metavar="FILE", help="bytes over a step, .png, .svg or .html")
    add("--snapshot", metavar="FILE", help="for https://pytorch.org/memory_viz")
    add("--output", metavar="FILE", help="append what the program prints there")
    add("--time", action="store_true", help="simulated time of a step, too")
    add("--trace", metavar="FILE", help="with --time: the last step for Perfetto")
    model = parser.add_argument_group("model files")
    add = model.add_argument
    add("--config", metavar="NAME", help="passed to plan_model")
    add("--system", choices=("lowtide", "fsdp2", "ddp"), help="default lowtide")
    add("--sequence", type=int, metavar="N", help="tokens; default 8192")
    add("--batch", type=int, metavar="N", help="sequences; default 1")
    add("--checkpoint", choices=("none", "selective", "full"), help="default full")
    add("--loss", choices=("plain", "chunked", "vocabulary"), help="default plain")
    add("--verify", action="store_true", help="plan again with what would save most")
    add("--microbatches", type=int, metavar="N", help="without sync; default 1")
    parser.set_defaults(
        run=run,
        hint_at_unknown=". A training script and its arguments follow `--`:"
        " plan [options] -- TRAIN.py ...",
    )


def run(options: argparse.Namespace) -> int:
    try:
        request = request_of(options)
        show, draw = _presentation(options)
        if options.ranks is not None:
            return _run_ranks(options, request)
        plan = _plan(request, verified=options.verify)
    except (ValueError, RuntimeError, ImportError) as error:
        _print_error(error)
        return 1
    if options.json:
        plan.write(options.json)
    show(plan)
    if draw is not None:
        draw(plan, options.timeline)
    return 0


def _run_ranks(options: argparse.Namespace, request: Request) -> int:
    from lowtide.phantom.dry import ranks
    from lowtide.phantom.dry.call_logs import shown
    from lowtide.planning import plan_ranks
    from lowtide.planning.table import progress_of_ranks, show_ranks

    require_one_rank("plan", options, *_OF_ONE_RANK)
    asked = ranks.parse(options.ranks, request.world)
    with progress_of_ranks(len(asked)) as advance:
        planned = plan_ranks(request, asked, advance)
    if options.json:
        planned.write(options.json)
    show_ranks(planned)
    for divergence in planned.verdict.divergences:
        print(divergence, file=sys.stderr)
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, error in planned.errors.items():
        alike.setdefault((error.traceback, str(error)), []).append(rank)
    for failed in alike.values():
        print(f"{shown(tuple(failed))}:", file=sys.stderr)
        _print_error(planned.errors[failed[0]])
    return 1 if planned.errors or planned.verdict.divergences else 0


def _print_error(error: Exception) -> None:
    if where := getattr(error, "traceback", ""):
        print(where.rstrip(), file=sys.stderr)
    print(error, file=sys.stderr)


def request_of(options: argparse.Namespace) -> Request:
    """Raises ValueError for what cannot be asked."""
    from lowtide.planning.report import parse_bytes
    from lowtide.planning.request import ModelFile, Request
    from lowtide.planning.run import allocator_conf

    world = 1 if options.world is None else options.world
    if not 0 <= options.rank < world:
        raise ValueError(
            f"lowtide: plan --rank: expected one of the {world} ranks, got "
            f"{options.rank}. Pass --world too."
        )
    if options.steps < 1:
        raise ValueError(
            f"lowtide: plan --steps: expected at least 1, got {options.steps}. The "
            "default of 3 reaches a steady state."
        )
    _require_folders(options)
    settings = {
        name: value
        for name in _OF_MODEL_FILES
        if (value := getattr(options, name)) is not None
    }
    program: ModelFile | Script
    if options.is_script:
        given = [*settings, *(["verify"] if options.verify else [])]
        program = _program_of(options, given)
    elif options.arguments:
        raise ValueError(
            "lowtide: plan: expected one model file, got "
            f"{' '.join([options.file, *options.arguments])}. A script and its "
            f"arguments follow `--`."
        )
    else:
        program = ModelFile(options.file, **settings)
    memory = options.device_memory
    return Request(
        program,
        world=world,
        rank=options.rank,
        torchrun=options.world is not None,
        steps=options.steps,
        device_memory=None if memory is None else parse_bytes(memory),
        gpu=options.gpu,
        allocator=allocator_conf(options.allocator),
        events=options.events,
        nonzero=options.nonzero,
        limit=options.limit,
        snapshot=options.snapshot,
        output=options.output,
        time=_keeps_time(options),
        trace=options.trace,
    )


def _program_of(options: argparse.Namespace, given: list[str]) -> Script:
    """What follows `--`. ``given`` are options that only model files have."""
    from lowtide.planning.request import Script

    if given:
        names = ", ".join(f"--{name}" for name in given)
        raise ValueError(
            f"lowtide: plan {names}: expected a model file, got a script, which says "
            "itself how it trains. Leave the option out, or give it to the script."
        )
    first, rest = options.file, tuple(options.arguments)
    launched = rest[0] if first == "-m" and rest else first
    if launched in _LAUNCHERS:
        raise ValueError(
            "lowtide: plan: expected what the launcher is given after `--`, got "
            f"{' '.join([first, *rest])}. Leave it and its options out: --world says "
            "how many ranks there are."
        )
    if first.startswith("-") and not (first == "-m" and rest):
        raise ValueError(
            "lowtide: plan: expected a script or -m MODULE after `--`, got "
            f"{' '.join([first, *rest])}. Leave other options of python out."
        )
    return Script((first, *rest))


def _require_folders(options: argparse.Namespace) -> None:
    for name in ("json", "timeline", "snapshot", "output", "trace"):
        path = getattr(options, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(
                f"lowtide: plan --{name}: expected a file in a folder that exists, got "
                f"{path!r}. Create the folder first."
            )


def _keeps_time(options: argparse.Namespace) -> bool:
    if options.trace and not options.time:
        raise ValueError(
            "lowtide: plan --trace: expected --time too, got none. Pass --time."
        )
    keeps: bool = options.time
    return keeps


def _plan(request: Request, *, verified: bool) -> Plan:
    from lowtide.planning import plan_request, verify
    from lowtide.planning.table import progress

    with progress(request.steps) as advance:
        plan = plan_request(request, advance)
        return verify(plan, request, advance) if verified else plan


def _presentation(
    options: argparse.Namespace,
) -> tuple[Callable[[Plan], None], Callable[[Plan, str], None] | None]:
    """Before anything runs, so that what is missing is said at once."""
    from lowtide.planning import extras

    extras.require("rich")
    from lowtide.planning.table import show

    if options.timeline is None:
        return show, None
    if not options.timeline.endswith((".png", ".svg", ".html")):
        raise ValueError(
            "lowtide: plan --timeline: expected a file ending in .png, .svg or .html, "
            f"got {options.timeline!r}. Choose one of the three."
        )
    extras.require("matplotlib")
    from lowtide.planning.picture import draw

    return show, draw
