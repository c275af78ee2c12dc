"""Figures that others measured on real GPUs, beside what the same programs take dry."""

from __future__ import annotations

import json
import statistics
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

from case import Case, Row, rows_of

from lowtide.phantom.dry import launch

NAME = "published"
PROGRAM = Path(__file__).parents[1] / "programs" / "published.py"
MIB, GIB, GB = 1 << 20, 1 << 30, 10**9
UNITS = {"MiB": MIB, "GiB": GIB, "GB": GB}


@dataclass(frozen=True)
class Published:
    """``metric`` of ``recipe`` (benchmarks/programs/published.py) on ``gpu``."""

    source: str
    what: str
    value: float
    unit: str
    metric: str
    gpu: str
    recipe: str
    settings: dict[str, int | str] = field(default_factory=dict)
    because: str = ""  # what is known of the difference


GPT2 = "rasbt/LLMs-from-scratch, ch05/10_llm-training-speed/README.md"
VIT = "rasbt/pytorch-memory-optim, logs.md"
LIGER = "linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv"


# Both sizes of batch lack what one more half-precision value of every layer would
# take, in fp32 nothing is missing.
OF_TORCH_2_1 = "grows with layers and batch as one more value a layer; not traced"


# Of a product with 50,257 columns; dry, both ways take the same time.
PADDED = "on a GPU, inductor pads a product if that is measured to be faster"


def of_gpt2(what: str, value: float, **settings: int) -> Published:
    text = f"GPT-2 124M, 1,024 tokens, {what}"
    return Published(
        GPT2, text, value, "GiB", "reserved", "a100-40", "gpt2", dict(settings)
    )


def of_vit(what: str, value: float, **settings: int | str) -> Published:
    text = f"ViT-L/16, Adam, {what}"
    because = OF_TORCH_2_1 if "precision" in settings else ""
    return Published(
        *(VIT, text, value, "GB", "max_reserved", "a100-40", "vit_l", settings),
        because,
    )


def of_liger(gpu: str, recipe: str, size: int, value: float) -> Published:
    setting = "width" if recipe == "layer_norm" else "vocabulary"
    text = f"{recipe}, {setting} {size}"
    settings: dict[str, int | str] = {setting: size}
    return Published(LIGER, text, value, "MiB", "max_allocated", gpu, recipe, settings)


FIGURES = (
    of_gpt2("plain code, batch 8", 26.2617, stage=0),
    of_gpt2("mask on the fly", 26.2422, stage=1),
    of_gpt2("tensor cores", 26.2422, stage=2),
    of_gpt2("fused AdamW", 26.2422, stage=3),
    of_gpt2("bf16", 13.7871, stage=5),
    of_gpt2("torch's norm and GELU", 11.5645, stage=6),
    of_gpt2("torch's attention", 5.9004, stage=7),
    replace(of_gpt2("compiled", 6.1875, stage=8), because=PADDED),
    of_gpt2("compiled, vocabulary 50,304", 5.8906, stage=9, vocabulary=50304),
    of_gpt2("compiled, batch 32", 22.5078, stage=10, vocabulary=50304, batch=32),
    of_vit("fp32, batch 64", 26.79),
    of_vit("16-mixed, batch 64", 18.21, precision="16-mixed"),
    of_vit("bf16, batch 64", 13.82, precision="bf16-true"),
    of_vit("bf16, batch 16", 5.69, precision="bf16-true", batch=16),
    of_liger("a100-80", "cross_entropy", 4096, 1280.126),
    of_liger("a100-80", "cross_entropy", 131072, 40960.125),
    of_liger("h100", "kl_div", 4096, 1792.0),
    of_liger("h100", "kl_div", 131072, 57344.0),
    of_liger("h100", "layer_norm", 1024, 80.06),
    of_liger("h100", "layer_norm", 16384, 1280.53),
)


def predict(figure: Published) -> float:
    """In the figure's unit."""
    machine = launch.Machine(gpu=figure.gpu)
    settings = [f"{name}={value}" for name, value in figure.settings.items()]
    done = subprocess.run(
        launch.command(
            [str(PROGRAM), figure.recipe, *settings], machine, launch.Settings()
        ),
        env=launch.environment(machine),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"published: {figure.what}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])[figure.metric] / UNITS[figure.unit]


def measure() -> list[Row]:
    row = rows_of(NAME)
    result, errors = [], []
    for figure in FIGURES:
        value = predict(figure)
        errors.append(100 * (value - figure.value) / figure.value)
        quantity = f"{figure.metric.replace('_', ' ')}, {figure.what}, {figure.gpu}"
        note = f"{errors[-1]:+.2f} %" + (
            f": {figure.because}" if figure.because else ""
        )
        result += [
            row("dry", quantity, round(value, 4), figure.unit, "simulated", note),
            row("GPU", quantity, figure.value, figure.unit, "published", figure.source),
        ]
    sizes = [abs(error) for error in errors]
    median = round(statistics.median(sizes), 2)
    result.append(row("dry", "median error", median, "%", "simulated"))
    result.append(row("dry", "worst error", round(max(sizes), 2), "%", "simulated"))
    return result


CASE = Case(
    name=NAME,
    describe="Memory that others measured on GPUs, and what their programs take dry.",
    how="""\
Programs written after the sources' descriptions (`benchmarks/programs/published.py`),
run over the [dry driver](design/phantom.md) with torch of today; the sources
used torch 2.1 to 2.6. Nothing was set so that figures match.
""",
    run=measure,
)
