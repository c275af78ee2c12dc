"""Measures lowtide on one NVIDIA GPU beside FSDP2 and beside bars; docs/gpu_check.md.

    check.py [--list] [--tiny] [--out DIR] [--read DIR] [STEP ...]

A step that fails is a row that says why, and the others go on. Exit status 1 if one
failed or a bar was missed. ``--read``: nothing is measured; rows of the figures of
another run, of the steps that it has.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

GPU = Path(__file__).resolve().parent
REPOSITORY = GPU.parents[1]
for directory in (GPU, GPU.parent, GPU.parent / "programs"):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))

import bars  # noqa: E402
import launch  # noqa: E402
import measure_cases as cases  # noqa: E402
import measure_clock as clock  # noqa: E402
import measure_frameworks as frameworks  # noqa: E402
import measure_ledger as ledger  # noqa: E402
import measure_llama as llama  # noqa: E402
import measure_parts as parts  # noqa: E402
import measure_plan as plan  # noqa: E402
import measure_trainer as trainer  # noqa: E402
import results  # noqa: E402
import tables  # noqa: E402
from case import Row  # noqa: E402
from scale import FULL, TINY, Scale  # noqa: E402

ENVIRONMENT = "environment"  # beside the figures of the steps
STEP_SECONDS = 600  # that one of its programs may take
HOW = """\
One GPU. Memory: rank 0 of 8 on torch's `fake` group, the highest of the third step.
Speed: one rank on NCCL, the systems step by step in turns in one process, events on the
GPU's stream."""


class Programs:
    """Runs programs of ../programs on the GPU; what each prints, read as JSON."""

    def __call__(self, name: str, *arguments: object) -> Any:
        return self._read(name, arguments, gpu=True)

    def dry(self, name: str, *arguments: object) -> Any:
        """Over the dry driver instead of the GPU, as one of its kind."""
        from lowtide.phantom.dry.launch import Machine

        return self._read(name, arguments, machine=Machine(gpu=kind_of_gpu()))

    def clocked(self, name: str, *arguments: object) -> Any:
        """The same, on the phantom's clock."""
        return self.dry("clocked.py", name, *arguments)

    def ranks(self, world: int, name: str, *arguments: object) -> Any:
        """All of a world, sharing the GPU; what rank 0 prints."""
        said = launch.run_ranks(world, name, *arguments, timeout=STEP_SECONDS)
        return json.loads(said.splitlines()[-1])

    def together(
        self, calls: Sequence[Sequence[object]], *, at_once: int = 3
    ) -> list[Any]:
        """Programs that measure bytes do not disturb each other as long as the device
        holds those that run ``at_once``."""
        with ThreadPoolExecutor(max_workers=at_once) as threads:
            return list(threads.map(lambda call: self(*map(str, call)), calls))

    def _read(self, name: str, arguments: Sequence[object], **where: Any) -> Any:
        printed = launch.run(name, *map(str, arguments), timeout=STEP_SECONDS, **where)
        return json.loads(printed.splitlines()[-1])


def kind_of_gpu() -> str:
    """The phantom's name of the GPU that is there."""
    import torch

    from lowtide.phantom.dry.launch import GPUS, Machine

    named = torch.cuda.get_device_name(0).lower().replace(" ", "")
    kinds = (kind for kind in GPUS if all(part in named for part in kind.split("-")))
    return next(kinds, Machine().gpu)


@dataclass(frozen=True)
class Step:
    """``measure`` gives figures that JSON can keep, ``read`` their rows."""

    name: str
    what: str
    measure: Callable[[Scale, Programs], Any]
    read: Callable[[Any], Iterator[Row]]


def of_each(
    name: str,
    what: str,
    each: Mapping[str, str],
    measure: Callable[..., Any],
    read: Callable[..., Iterator[Row]],
) -> Iterator[Step]:
    """Steps that differ in the first argument, by what their names end in."""
    for end, argument in each.items():
        of = (partial(measure, argument), partial(read, argument))
        yield Step(f"{name}-{end}", what.format(argument), *of)


def steps(scale: Scale) -> list[Step]:
    return [
        *of_each(
            "memory",
            "peaks of the slice at world 8, checkpoint {}",
            {checkpoint: checkpoint for checkpoint in llama.CHECKPOINTS},
            *(llama.llama_memory, llama.llama_memory_rows),
        ),
        Step(
            *("bits", "losses and parameters beside FSDP2's"),
            *(llama.bits, llama.bits_rows),
        ),
        Step(
            *("ranks", "the same of ranks that share the GPU"),
            *(llama.ranks, llama.ranks_rows),
        ),
        Step(
            *("graphs", "losses and parameters of CUDA graphs"),
            *(llama.graphs, llama.variants_rows),
        ),
        *of_each(
            "speed",
            "step time of the slice, NCCL, loss {}",
            llama.losses(scale),
            *(llama.llama_speed, llama.llama_speed_rows),
        ),
        Step(
            *("links", "bandwidth to and from the host"),
            *(parts.links, parts.links_rows),
        ),
        Step(
            *("kernels", "bandwidth of the operators"),
            *(parts.kernels, parts.kernels_rows),
        ),
        Step(
            *("step-kernels", "what a step's kernels take, by kind"),
            *(parts.step_kernels, parts.step_kernels_rows),
        ),
        Step(
            *("case1-memory", "peaks with flat gradients"),
            *(cases.flat_peaks, cases.flat_peaks_rows),
        ),
        Step(
            *("case1-speed", "rate with flat gradients"),
            *(cases.flat_speed, cases.flat_speed_rows),
        ),
        Step(
            *("case2-memory", "peaks with offload of the residual"),
            *(cases.residual_peaks, cases.residual_peaks_rows),
        ),
        Step(
            *("case2-speed", "step time with offload of the residual"),
            *(cases.residual_speed, cases.residual_speed_rows),
        ),
        Step(
            *("host", "host time per unit"),
            *(parts.host_units, parts.host_units_rows),
        ),
        Step(
            *("optimizer", "host time of an optimizer's step"),
            *(parts.optimizer, parts.optimizer_rows),
        ),
        Step(
            *("ledger", "ledger, and the same step dry"),
            *(ledger.ledger, ledger.ledger_rows),
        ),
        Step(
            *("clock", "times beside the phantom's clock"),
            *(clock.clock, clock.clock_rows),
        ),
        Step(
            *("frameworks", "examples of frameworks under lowtide run"),
            *(frameworks.frameworks, frameworks.frameworks_rows),
        ),
        *of_each(
            "trainer",
            "peaks of torchtitan's trainer, {}",
            {mode: mode for mode in trainer.MODES},
            *(trainer.trainer, trainer.trainer_rows),
        ),
        Step(
            *("models", "losses of torchtitan's models, ranks that share the GPU"),
            *(trainer.models, trainer.models_rows),
        ),
        Step(
            *("addresses", "where memory lies"),
            *(parts.addresses, parts.addresses_rows),
        ),
        Step(
            *("plan", "bytes of programs of others beside the phantom's"),
            *(plan.plan, plan.plan_rows),
        ),
    ]


def rows_of(step: Step, scale: Scale, programs: Programs, out: Path) -> list[Row]:
    """The figures as they came are kept in ``out``."""
    try:
        figures = step.measure(scale, programs)
    except Exception as error:
        traceback.print_exc()
        return [bars.row("lowtide", step.what, None, "", "missing", last_line(error))]
    keep(out, step.name, figures)
    return list(step.read(figures))


def keep(folder: Path, name: str, figures: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def kept(folder: Path, name: str) -> Any:
    """None: that run does not have it."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def last_line(error: Exception) -> str:
    """What was done, and what became of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else repr(error)


def describe() -> dict[str, str | int]:
    import environment
    import torch

    gpu, cuda = torch.cuda.get_device_name(0), torch.version.cuda or "none"
    return environment.describe() | {"GPU": gpu, "CUDA": cuda}


def write(
    of_steps: Mapping[str, Sequence[Row]], described: dict[str, Any], out: Path
) -> None:
    rows = [row for of_step in of_steps.values() for row in of_step]
    result = results.Result(
        case=bars.NAME,
        describe="On one GPU, by `bash benchmarks/gpu_check.sh`.",
        how=HOW,
        headlines=(),
        command="bash benchmarks/gpu_check.sh",
        environment=described,
        rows=tuple(rows),
    )
    results.write(result, out)
    (out / "gpu_check.md").write_text(page(of_steps, described))


def page(of_steps: Mapping[str, Sequence[Row]], described: dict[str, Any]) -> str:
    """A table a step: their systems differ."""
    lines = [HOW, ""]
    for name, rows in of_steps.items():
        lines += [f"### {name}", "", *tables.table(rows), ""]
    said = ", ".join(f"{what} {value}" for what, value in described.items())
    return "\n".join([*lines, f"Obtained with {said}.", ""])


def read(folder: Path, names: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Rows of another run's figures, by step: of those named, or of all."""
    return {
        step.name: list(step.read(figures))
        for step in steps(FULL)
        if step.name in (names or (step.name,))
        and (figures := kept(folder, step.name)) is not None
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", nargs="*", metavar="STEP", help="default: all")
    parser.add_argument("--list", action="store_true", help="name the steps and stop")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes of a dry run: figures mean nothing"
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out/gpu_check")
    parser.add_argument("--read", type=Path, help="figures/ of another run")
    options = parser.parse_args(arguments)
    scale = TINY if options.tiny else FULL
    known = {step.name: step for step in steps(scale)}
    if unknown := sorted(set(options.step) - set(known)):
        parser.error(f"expected {', '.join(known)}, got {', '.join(unknown)}")
    if options.list:
        for step in known.values():
            print(f"{step.name:<18}{step.what}")
        return 0
    of_steps: dict[str, list[Row]] = {}
    if options.read is not None:
        described = kept(options.read, ENVIRONMENT)
        of_steps = read(options.read, options.step)
        write(of_steps, described, options.out)
    else:
        described = describe()
        keep(options.out / "figures", ENVIRONMENT, described)
        for name in options.step or known:
            print(f"-- {name}: {known[name].what}", flush=True)
            rows = rows_of(known[name], scale, Programs(), options.out / "figures")
            print("\n".join(tables.table(rows)), flush=True)
            of_steps[name] = rows
            write(of_steps, described, options.out)
    rows = [row for of_step in of_steps.values() for row in of_step]
    bad = [f"bar missed: {quantity}" for quantity in bars.missed(rows)]
    bad += [f"failed: {r.quantity}: {r.note}" for r in rows if r.kind == "missing"]
    print("\n".join(bad))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
