"""torchtitan's trainer, unedited, under FSDP2 and under `lowtide run`: what it reserves
beside the phantom's bytes, and the bits of its models' training.

No step time: the `fake` group reduces nothing, so what is multiplied after the first
step is whatever memory held, and how fast a GPU multiplies depends on that."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import bars
import measure_frameworks as frameworks
import measure_llama as llama
from bars import row, with_bar
from case import Row
from figures import GIB, Figures, Programs
from scale import Scale

RANKS, BATCH, STEPS = 8, 2, 8
PEAKS = ("reserved", "allocated")
DEFERRED = "deferred logits"
SYSTEMS = {
    "fsdp2": ("fsdp2",),
    "lowtide": ("lowtide",),
    f"lowtide, {DEFERRED}": ("lowtide", "--defer-logits"),
}
SELECTIVE = (
    *("--activation_checkpoint.mode", "selective"),
    *("--activation_checkpoint.selective_ac_option", "op"),
)
MODES: dict[str, tuple[str, ...]] = {"eager": (), "compiled": ("--compile.enable",)}


def trainer(mode: str, scale: Scale, programs: Programs) -> Figures:
    """Rank 0 of eight on the `fake` group, on the GPU and dry. One at a time: the
    largest takes more than half of the GPU."""
    calls = {system: call_of(system, mode, scale) for system in SYSTEMS}
    with ThreadPoolExecutor() as threads:
        dry = [threads.submit(programs.dry, *call) for call in calls.values()]
        here = [programs(*call) for call in calls.values()]
    return {
        system: {"CUDA": peaks_of(seen), "dry": peaks_of(said.result())}
        for system, seen, said in zip(calls, here, dry, strict=True)
    }


def call_of(system: str, mode: str, scale: Scale) -> tuple[str | int, ...]:
    model, flavor, *options = scale.trainer
    return (
        *("unedited.py", *SYSTEMS[system], "titan_trainer.py", model, flavor),
        *("--fake", RANKS, *options, *SELECTIVE, *MODES[mode]),
        *("--training.steps", STEPS, "--training.local_batch_size", BATCH),
    )


def peaks_of(printed: Figures) -> dict[str, int]:
    """Of the last step."""
    return {peak: printed["steps"][-1][peak] for peak in PEAKS}


def trainer_rows(mode: str, figures: Figures) -> Iterator[Row]:
    theirs = figures["fsdp2"]
    for system, seen in figures.items():
        what = f"torchtitan's trainer, 8B, {RANKS} ranks, {mode}, {system}"
        for peak in PEAKS:
            for where, kind in (("CUDA", "measured"), ("dry", "simulated")):
                gib = seen[where][peak] / GIB
                yield row(where, f"{peak}, {what}", gib, "GiB", kind)
        if system == "fsdp2":
            continue
        bar = bars.DEFERRED_OF_FSDP2 if DEFERRED in system else bars.OF_FSDP2_RESERVED
        share = seen["CUDA"]["reserved"] / theirs["CUDA"]["reserved"]
        yield from with_bar(f"of FSDP2's reserved, {what}", share, bar)


# -- bits ------------------------------------------------------------------------------

EXACT = (
    *("--training.steps", 4, "--training.local_batch_size", 4),
    *("--training.seq_len", 512, "--debug.seed", 1, "--debug.deterministic"),
    *("--optimizer.lr", "1e-2", "--lr_scheduler.warmup_steps", 0),
)
FLOAT8 = "quantize.linear.float8"
# Ranks, and what is asked of torchtitan.
MODELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "llama": (2, ("llama3", "debugmodel", *SELECTIVE)),
    "compiled": (2, ("llama3", "debugmodel", *SELECTIVE, "--compile.enable")),
    "float8": (
        2,
        (
            *("llama3", "debugmodel", "--model.converters", FLOAT8),
            f"--{FLOAT8}.enable_fsdp_float8_all_gather",
            f"--{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp",
        ),
    ),
    "tensor parallel": (
        4,
        ("llama3", "debugmodel", "--parallelism.tensor_parallel_degree", "2"),
    ),
    "experts": (
        4,
        ("deepseek_v3", "debugmodel", "--parallelism.expert_parallel_degree", "2"),
    ),
}
HOW = {"fsdp2": ("fsdp2",), "fsdp2 again": ("fsdp2",), "lowtide": ("lowtide",)}


def models(scale: Scale, programs: Programs) -> Figures:
    """What is there of each model's training, by how it ran."""
    llama.require_sharing()
    figures: Figures = {}
    for name in scale.trained:
        world, asked = MODELS[name]
        with ThreadPoolExecutor(max_workers=len(HOW)) as threads:
            running = {
                how: threads.submit(
                    programs.ranks,
                    world,
                    *("unedited.py", *words, "titan_trainer.py", *asked, *EXACT),
                )
                for how, words in HOW.items()
            }
        figures[name] = {
            how: {
                "steps": [[s["loss"], s["norm"]] for s in said.result()["steps"]],
                "parameters": said.result()["parameters"],
            }
            for how, said in running.items()
        }
    return figures


def models_rows(figures: Figures) -> Iterator[Row]:
    """Of a training, a line is the parameters, and others a step's loss and norm."""
    for name, said in figures.items():
        where = f"torchtitan's {name}, {MODELS[name][0]} ranks on one GPU"
        lines = {
            how: [seen["parameters"], *seen["steps"]] for how, seen in said.items()
        }
        yield from frameworks.differing(where, lines)
