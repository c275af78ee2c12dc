"""What programs take on the GPU beside what the phantom says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import measure_llama as llama
from bars import row
from case import Row
from figures import GIB, Figures, Programs
from scale import Scale

# Of benchmarks/programs/published.py, those that need no package beside torchvision.
RECIPES: tuple[tuple[str, ...], ...] = (
    ("language.gpt2", "stage=0"),
    ("language.gpt2", "stage=5"),
    ("language.gpt2", "stage=7"),
    ("language.gpt2", "stage=8"),
    ("language.cross_entropy", "vocabulary=131072"),
    ("language.layer_norm", "width=16384"),
    ("vision.vit_l",),
    ("vision.vit_l", "precision=16-mixed"),
    ("vision.vit_l", "precision=bf16-true", "batch=4", "accumulated=4"),
)
PEAKS = ("max_allocated", "max_reserved")
AT_ONCE = 3


def plan(scale: Scale, programs: Programs) -> Figures:
    """Each program on the GPU and dry."""
    recipes = RECIPES[: scale.recipes]
    calls: dict[str, Sequence[object]] = {
        " ".join(recipe): ("published.py", *recipe) for recipe in recipes
    }
    for checkpoint in llama.CHECKPOINTS[: scale.recipes]:
        for system in llama.LLAMA_SYSTEMS:
            name = f"slice of 8B, checkpoint {checkpoint}, {system}"
            calls[name] = llama.memory_call(scale, checkpoint, system)
    with ThreadPoolExecutor() as threads:
        dry = [threads.submit(programs.dry, *map(str, c)) for c in calls.values()]
        here = programs.together(list(calls.values()), at_once=AT_ONCE)
    return {
        name: {"CUDA": peaks_of(on), "dry": peaks_of(said.result())}
        for name, on, said in zip(calls, here, dry, strict=True)
    }


def peaks_of(printed: Figures) -> dict[str, int]:
    """Of published.py, or of llama_memory.py's third step."""
    if "steady" not in printed:
        return {peak: printed[peak] for peak in PEAKS}
    steady = llama.steady(printed)
    return {peak: steady[peak.removeprefix("max_")] for peak in PEAKS}


def plan_rows(figures: Figures) -> Iterator[Row]:
    for name, seen in figures.items():
        for peak in PEAKS:
            quantity = f"{name}: {peak.replace('_', ' ')}"
            here, dry = seen["CUDA"][peak], seen["dry"][peak]
            yield row("CUDA", quantity, here / GIB, "GiB", "measured")
            yield row("dry", quantity, dry / GIB, "GiB", "simulated")
            error = 100 * (dry - here) / here
            yield row("error in %", quantity, round(error, 3), "%", "arithmetic")
