"""Figures that others measured on real GPUs, beside what the same programs take dry."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from case import Case, Row, rows_of
from foreign import Absent, has_foreign
from points import Points

from lowtide.phantom.dry.launch import Machine

NAME = "published"
PROGRAM = "published.py"
MIB, GIB, GB = 1 << 20, 1 << 30, 10**9
UNITS = {"MiB": MIB, "GiB": GIB, "GB": GB}
WITHIN = "published figures of real GPUs, given within 1 %"
MEDIAN = "median error of all"
TIMEOUT = 3600.0  # seconds; a whole training run is among the programs


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
    ranks: int | None = None
    memory: int | None = None  # bytes of the GPU, where they are not ``gpu``'s
    because: str = ""  # what is known of the difference
    foreign: bool = True  # its program or its packages are in LOWTIDE_FOREIGN

    @property
    def arguments(self) -> tuple[str, ...]:
        settings = (f"{name}={value}" for name, value in self.settings.items())
        return (self.recipe, *settings)


# -- language models, written anew ----------------------------------------------------

GPT2 = "rasbt/LLMs-from-scratch, ch05/10_llm-training-speed/README.md, torch 2.6"
PADDED = (
    "on a GPU inductor measures that the product with 50,257 columns is faster padded, "
    "with buffers of 256 MB in torch 2.6; dry both ways take the same time, and "
    "nothing is padded: padded and measured so it is 6.182 GiB, 0.1 % off"
)


def of_gpt2(what: str, value: float, because: str = "", **settings: int) -> Published:
    ranks = settings.get("ranks")
    return Published(
        *(GPT2, f"GPT-2 124M, 1,024 tokens, {what}", value, "GiB", "reserved"),
        *("a100-40", "language.gpt2", dict(settings), ranks),
        because=because,
        foreign=False,
    )


LIGER = "linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv"


def of_liger(gpu: str, recipe: str, size: int, value: float) -> Published:
    setting = "width" if recipe == "layer_norm" else "vocabulary"
    return Published(
        *(LIGER, f"{recipe}, {setting} {size}", value, "MiB", "max_allocated"),
        *(gpu, f"language.{recipe}", {setting: size}),
        foreign=False,
    )


# -- vision ---------------------------------------------------------------------------

VIT_L = "rasbt/pytorch-memory-optim, logs.md, torch 2.1.0.dev20230623"
FLASH_1 = (
    "in half precision that torch had the first FlashAttention, whose output lies "
    "batch first, so that MultiheadAttention copies it: one more value kept a layer"
)
TWO_VALUES = (
    f"{FLASH_1}; and that torch's Adam held two new values of every parameter's size "
    "in a step, 0.61 GB each, where today's holds one"
)
BEHIND_EVENTS = (
    "FSDP1 gives blocks to other streams, so they are free when the host finds events "
    "done: 7.90 if that is only when it waits, 11.65 without limit_all_gathers, which "
    "that torch had off (pytorch/pytorch#104900); FSDP2 has no such blocks"
)


def of_vit_l(
    what: str, value: float, because: str = "", **settings: int | str
) -> Published:
    ranks = settings.get("ranks")
    assert ranks is None or isinstance(ranks, int)
    return Published(
        *(VIT_L, f"ViT-L/16, {what}", value, "GB", "max_reserved"),
        *("a100-40", "vision.vit_l", settings, ranks),
        because=because,
        foreign=False,
    )


TORCHAO = "pytorch/ao, torchao/optim/README.md, torch 2.4, RTX 4070 Ti SUPER"
VIT_H = {"model": "vit_huge_patch14_224", "batch": 8, "compiled": 1}
VIT_G = {"model": "vit_giant_patch14_dinov2", "batch": 32, "bf16": 1, "checkpoint": 1}


def of_torchao(
    what: str, value: float, network: dict[str, int | str], **settings: int | str
) -> Published:
    return Published(
        *(TORCHAO, what, value, "GB", "max_allocated", "rtx4090"),
        *("vision.vit_timm", network | settings),
    )


# -- LoRA -----------------------------------------------------------------------------

LITGPT = "Lightning-AI/litgpt, tutorials/resource-tables.md, commit 8641822, torch 2.1"
MEAN = (
    "torch 2.1 kept what torch.mean averages for its backward, so the squares of every "
    "RMSNorm: one more value a norm, read by running that torch"
)


def of_litgpt(name: str, batch: int, tokens: int, value: float) -> Published:
    because = MEAN if name.startswith("Llama") else ""
    return Published(
        *(LITGPT, f"LoRA r 8, {name}, batch {batch} x {tokens}", value, "GB"),
        *("max_allocated", "a100-40", "lora.litgpt"),
        {"model": name, "batch": batch, "tokens": tokens},
        because=because,
    )


PEFT = "huggingface/peft, method_comparison/MetaMathQA/results, torch 2.13"
# How long the longest batch was is not published, only that it had 768 tokens or less.
# With 704 the report's figure of another method (ln_tuning), which is not counted here,
# is met: dry 21.120, published 21.181 GB.
LONGEST = 704


def of_peft(what: str, bytes_: int, **settings: int | str) -> Published:
    return Published(
        *(PEFT, f"Llama-3.2-3B, LoRA {what}", bytes_ / GB, "GB", "max_reserved"),
        *("l40s", "lora.peft", {"tokens": LONGEST} | settings),
    )


# -- whole trainers, unedited ---------------------------------------------------------

H100_96 = round(94.98 * GIB)  # as its logs have it: 49.58 GiB are 52.20 % of it
TABLE = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
# The report does not say which segments; of the repository's two scripts then, that
# for several machines leaves torch's, that for one sets expandable ones.
SEGMENTS = "of 8 GPUs with expandable segments, which one of two scripts sets: {}"


FLEX = "pytorch/torchtitan#1884"
FLEX_COMMIT = "3114f2fbc"
FLEX_ARGUMENTS = (
    "--model.flavor 8B_flex_attn --activation_checkpoint.mode full "
    "--parallelism.context_parallel_degree 2"
)
DEFAULT_SEGMENTS = (
    "its script sets expandable segments; with default ones {} GiB, 11.67 more in the "
    "last step than in the first, as published (11.63)"
)


def of_torchtitan(
    source: str,
    what: str,
    value: float,
    commit: str,
    *,
    metric: str = "steady",
    ranks: int = 8,
    because: str = "",
    segments: str = "expandable",
    arguments: str = "",
) -> Published:
    old = commit == "9dec370"
    models = "llama3" if commit == FLEX_COMMIT else "llama"
    configs = "train_configs" if old else f"torchtitan/models/{models}/train_configs"
    settings: dict[str, int | str] = {
        "commit": commit,
        "file": "train.py" if old else "torchtitan/train.py",
        "config": f"{configs}/llama3_8b.toml",
        "segments": segments,
        "attention": "flash",
        "ranks": ranks,
    }
    if arguments:
        settings["arguments"] = arguments
    return Published(
        *(source, f"torchtitan's trainer, Llama 3 8B, FSDP2, {what}", value, "GiB"),
        *(metric, "h100", "trainers.torchtitan", settings, ranks, H100_96, because),
    )


def of_table(
    what: str, value: float, ranks: int, arguments: str = "", because: str = ""
) -> Published:
    return of_torchtitan(
        *(TABLE, f"batch 2, {what}", value, "9dec370"),
        ranks=ranks,
        because=because,
        segments="torch's own",
        arguments=f"--training.batch_size 2 {arguments}".strip(),
    )


RECORDS = "records/track_1_short"


def of_record(metric: str, value: int, log: str, torch: str) -> Published:
    return Published(
        f"KellerJordan/modded-nanogpt, {RECORDS}/{log}, torch {torch}",
        f"modded-nanogpt of {log[:10]}, DDP, compiled, FlexAttention",
        *(value, "MiB", metric, "h100", "trainers.modded_nanogpt"),
        {"log": f"{RECORDS}/{log}"},
        ranks=8,
    )


MFU_LOG = "2024-12-10_MFUTweaks/04df8c70-2462-4b6c-9e49-c7589b321a81.txt"
EMBEDS_LOG = "2024-12-17_SparsifyEmbeds/165384d5-5a41-4fba-9b79-8ecc372616ea.txt"
SOFTCAP_LOG = "2025-01-04_SoftCap/31d6c427-f1f7-4d8a-91be-a67b5dcd13fd.txt"

FIGURES = (
    of_gpt2("plain code, batch 8", 26.2617, stage=0),
    of_gpt2("mask on the fly", 26.2422, stage=1),
    of_gpt2("tensor cores", 26.2422, stage=2),
    of_gpt2("fused AdamW", 26.2422, stage=3),
    of_gpt2("bf16", 13.7871, stage=5),
    of_gpt2("torch's norm and GELU", 11.5645, stage=6),
    of_gpt2("torch's attention", 5.9004, stage=7),
    of_gpt2("compiled", 6.1875, PADDED, stage=8),
    of_gpt2("compiled, vocabulary 50,304", 5.8906, stage=9, vocabulary=50304),
    of_gpt2("compiled, batch 32", 22.5078, stage=10, vocabulary=50304, batch=32),
    of_gpt2(
        *("compiled, batch 32, DDP of 4", 22.7969),
        **{"stage": 10, "vocabulary": 50304, "batch": 32, "ranks": 4},
    ),
    of_liger("a100-80", "cross_entropy", 4096, 1280.126),
    of_liger("a100-80", "cross_entropy", 131072, 40960.125),
    of_liger("h100", "kl_div", 4096, 1792.0),
    of_liger("h100", "kl_div", 131072, 57344.0),
    of_liger("h100", "layer_norm", 1024, 80.06),
    of_liger("h100", "layer_norm", 16384, 1280.53),
    of_vit_l("fp32, batch 64", 26.79),
    of_vit_l("16-mixed, batch 64", 18.21, FLASH_1, precision="16-mixed"),
    of_vit_l("bf16, batch 64", 13.82, FLASH_1, precision="bf16-true"),
    of_vit_l("bf16, batch 16", 5.69, FLASH_1, precision="bf16-true", batch=16),
    of_vit_l(
        *("bf16, batch 4 x 4", 3.91, TWO_VALUES),
        **{"precision": "bf16-true", "batch": 4, "accumulated": 4},
    ),
    of_vit_l(
        *("bf16, batch 4 x 4, SGD", 2.02, FLASH_1),
        **{"precision": "bf16-true", "batch": 4, "accumulated": 4, "optimizer": "sgd"},
    ),
    of_vit_l("fp32, batch 64, FSDP of 4, checkpointed", 6.59, BEHIND_EVENTS, ranks=4),
    of_torchao("ViT-H/14, AMP, compiled, fused AdamW", 12.23, VIT_H),
    of_torchao(
        "ViT-H/14, AMP, compiled, AdamW8bit", 8.33, VIT_H, optimizer="AdamW8bit"
    ),
    of_torchao(
        "ViT-H/14, AMP, compiled, AdamW4bit", 7.72, VIT_H, optimizer="AdamW4bit"
    ),
    of_torchao("ViT-g/14, bf16, checkpointed", 9.82, VIT_G),
    of_torchao("ViT-g/14, the same compiled", 9.90, VIT_G, compiled=1),
    of_torchao("ViT-g/14, optimizer offloaded", 5.24, VIT_G, optimizer="offload"),
    of_torchao(
        "ViT-g/14, gradients offloaded", 4.01, VIT_G, optimizer="offload_gradients"
    ),
    of_litgpt("phi-1_5", 1, 1044, 4.82),
    of_litgpt("phi-1_5", 2, 1044, 6.76),
    of_litgpt("phi-1_5", 4, 1044, 10.68),
    of_litgpt("stablelm-base-alpha-3b", 1, 1034, 9.69),
    of_litgpt("stablelm-base-alpha-3b", 2, 1034, 12.10),
    of_litgpt("stablelm-base-alpha-3b", 4, 1034, 16.92),
    of_litgpt("Llama-2-7b-hf", 1, 1304, 21.30),
    of_litgpt("Llama-2-7b-hf", 2, 1304, 29.07),
    of_litgpt("Llama-2-13b-hf", 1, 1304, 38.12),
    of_peft("r 32", 22_292_725_760),
    of_peft("r 64", 22_552_772_608, rank=64),
    of_peft("r 32, DoRA", 24_532_484_096, dora=1),
    of_peft(
        *("r 10 in the MLP", 24_698_159_104),
        **{"rank": 10, "targets": "gate_proj,up_proj,down_proj"},
    ),
    of_torchtitan("pytorch/torchtitan#996", "batch 1", 49.58, "f3943dd"),
    of_torchtitan(
        *("pytorch/torchtitan#929", "batch 1, compiled, first step", 40.15, "9a2f578"),
        metric="first",
        arguments="--training.compile",
    ),
    of_torchtitan(
        *("pytorch/torchtitan#929", "batch 1, compiled", 47.65, "9a2f578"),
        arguments="--training.compile",
    ),
    of_torchtitan(
        *(FLEX, "flex attention, context parallel, first step", 33.21, FLEX_COMMIT),
        metric="first",
        ranks=4,
        arguments=FLEX_ARGUMENTS,
        because=DEFAULT_SEGMENTS.format(32.68),
    ),
    of_torchtitan(
        *(FLEX, "flex attention, context parallel", 44.84, FLEX_COMMIT),
        ranks=4,
        arguments=FLEX_ARGUMENTS,
        because=DEFAULT_SEGMENTS.format(44.35),
    ),
    of_table("8 GPUs", 82.4, 8, because=SEGMENTS.format("79.14 GiB")),
    of_table(
        *("8 GPUs, compiled", 77.0, 8, "--training.compile"),
        because=SEGMENTS.format("75.37 GiB"),
    ),
    of_table("128 GPUs", 67.0, 128),
    of_table("128 GPUs, compiled", 62.0, 128, "--training.compile"),
    of_record("max_allocated", 34239, MFU_LOG, "2.6.0.dev20241203"),
    of_record("max_allocated", 31361, EMBEDS_LOG, "2.6.0.dev20241223"),
    of_record("max_reserved", 36734, EMBEDS_LOG, "2.6.0.dev20241223"),
    of_record("max_allocated", 31563, SOFTCAP_LOG, "2.6.0.dev20241231"),
)


class _Runs(Points):
    """Of the figures' programs, each on the machine of its figure."""

    def __init__(self, figures: Sequence[Published]) -> None:
        super().__init__(PROGRAM, timeout=TIMEOUT)
        self._machines: dict[tuple[str, ...], Machine] = {}
        for figure in figures:
            on = Machine(gpu=figure.gpu, world=figure.ranks, memory=figure.memory)
            if self._machines.setdefault(figure.arguments, on) != on:
                raise ValueError(
                    f"published: {figure.what}: expected equal arguments on one "
                    f"machine, got {on} beside {self._machines[figure.arguments]}. "
                    "Make what differs a setting of its recipe."
                )

    def _machine(self, arguments: Sequence[str]) -> Machine:
        return self._machines[tuple(arguments)]


def rows_of_figure(figure: Published, value: float | Absent) -> list[Row]:
    row = rows_of(NAME)
    metric = {"first": "max reserved", "steady": "max reserved"}.get(
        figure.metric, figure.metric.replace("_", " ")
    )
    quantity = f"{figure.what}, {metric}"
    gpu = row("GPU", quantity, figure.value, figure.unit, "published", figure.source)
    if isinstance(value, Absent):
        dry = row("dry", quantity, None, figure.unit, "missing", str(value))
        return [dry, gpu]
    dry = row(
        "dry", quantity, round(value, 4), figure.unit, "simulated", figure.because
    )
    error = round(percent(figure, value), 2)
    return [dry, gpu, row("error in %", quantity, error, "%", "arithmetic")]


def percent(figure: Published, value: float) -> float:
    return 100 * (value - figure.value) / figure.value


def values_of(figures: Sequence[Published]) -> list[float | Absent]:
    """In the figures' units."""
    here = [figure for figure in figures if has_foreign() or not figure.foreign]
    found = _Runs(here).each([figure.arguments for figure in here])
    runs = dict(zip((figure.arguments for figure in here), found, strict=True))
    return [value_of(figure, runs) for figure in figures]


def value_of(figure: Published, runs: Mapping[Any, Any]) -> float | Absent:
    if figure.arguments not in runs:
        return Absent()
    value: float = runs[figure.arguments][figure.metric]
    return value / UNITS[figure.unit]


def rows_alone(figure: Published) -> list[Row]:
    (value,) = values_of([figure])
    if isinstance(value, Absent):
        raise value
    return rows_of_figure(figure, value)


def measure() -> list[Row]:
    values = values_of(FIGURES)
    result = []
    for figure, value in zip(FIGURES, values, strict=True):
        result += rows_of_figure(figure, value)
    errors = [
        abs(percent(figure, value))
        for figure, value in zip(FIGURES, values, strict=True)
        if not isinstance(value, Absent)
    ]
    row = rows_of(NAME)
    median = round(statistics.median(errors), 2)
    within = sum(error <= 1 for error in errors)
    return [
        *result,
        row("dry", WITHIN, within, f"of {len(errors)}", "arithmetic"),
        row("dry", MEDIAN, median, "%", "arithmetic"),
        row("dry", "worst error", round(max(errors), 2), "%", "arithmetic"),
    ]


CASE = Case(
    name=NAME,
    describe="Memory that others measured on GPUs, and what their programs take dry.",
    how="""\
Run over the [driver that computes nothing](design/phantom.md), with torch of today;
the sources used torch 2.1 to 2.13. The programs are in
`benchmarks/programs/published*.py`: GPT-2, single layers and vision transformers after
the sources' descriptions, LoRA with litgpt's and peft's layers, torchtitan's trainer
and modded-nanogpt's programs whole and unedited, each at the commit that was measured.

Those of others and their packages are looked for in the folder that `LOWTIDE_FOREIGN`
names, and are missing from the table without it:

```sh
python -m pip install --no-deps --target $LOWTIDE_FOREIGN/packages \\
  -r requirements/published.txt
for repository in pytorch/torchtitan Lightning-AI/litgpt KellerJordan/modded-nanogpt
do
  git clone https://github.com/$repository $LOWTIDE_FOREIGN/${repository#*/}
done
```

Settings are the sources'; two things stand for what they do not say or torch has
changed. On Hopper torch took FlashAttention until cuDNN 9.15 (pytorch/pytorch#138522),
so torchtitan's programs, which are older, get torch's own switch for that order. peft's
longest batch is inferred from a figure of the same report that is not among the rows.
cuDNN's workspaces are taken to be empty, and an RTX 4090 stands for the 4070 Ti SUPER.
""",
    run=measure,
    parts={
        f"{figure.what}, {figure.metric}": partial(rows_alone, figure)
        for figure in FIGURES
    },
    headlines=(WITHIN, MEDIAN),
    only_by_name="an hour, and wants clones of other repositories",
)
