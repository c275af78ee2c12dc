"""Training scripts of others as they stand, planned without a GPU."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from case import Case, Row, rows_of
from foreign import Absent, foreign
from launch import ENVIRONMENT, PROGRAMS
from published_support import check_out

NAME = "foreign_scripts"
GIB = 1 << 30
STEPS = 3
LIMIT = 1800  # seconds


def nothing(folder: Path) -> None:
    """The script makes its data itself."""


def token_files(folder: Path) -> None:
    """Those of nanoGPT's openwebtext, ten million tokens each, all of them 0."""
    data = folder / "data" / "openwebtext"
    data.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        with (data / f"{part}.bin").open("wb") as file:
            file.truncate(20_000_000)


def words(folder: Path) -> None:
    """Text with as many different words as WikiText-2's."""
    generator = random.Random(0)
    vocabulary = [f"w{number}" for number in range(33276)]
    text = vocabulary + generator.choices(vocabulary, k=400_000)
    lines = (" ".join(text[at : at + 20]) for at in range(0, len(text), 20))
    (folder / "data").mkdir()
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(lines))


def images(folder: Path) -> None:
    from PIL import Image

    (folder / "images").mkdir()
    for number in range(512):
        Image.new("RGB", (64, 64)).save(folder / "images" / f"{number}.png")


@dataclass(frozen=True)
class Script:
    """``program`` is a file of ``repository`` at ``commit``, of which ``wanted`` is
    taken; without a repository one of benchmarks/programs."""

    what: str
    program: str
    arguments: str = ""
    repository: str = ""
    commit: str = ""
    wanted: tuple[str, ...] = ()
    gpu: str = "h100"
    world: int | None = None
    make: Callable[[Path], None] = nothing
    origin: str = ""  # of a program of benchmarks/programs
    packages: bool = True  # whether it imports those of others

    @property
    def source(self) -> str:
        if not self.repository:
            return f"benchmarks/programs/{self.program}: {self.origin}"
        called = f"{self.program} {self.arguments}".rstrip()
        return f"{self.repository} at {self.commit}, {called}"


LIGHTNING = {
    "repository": "Lightning-AI/pytorch-lightning",
    "commit": "7f0c3436",
    "wanted": ("examples",),
    "make": words,
}
TITAN = "torchtitan/models/llama/train_configs/llama3_8b.toml"
FLOAT8 = (
    "--training.compile --model.converters float8 "
    "--float8.enable_fsdp_float8_all_gather "
    "--float8.precompute_float8_dynamic_scale_for_fsdp"
)
FULL = "--activation_checkpoint.mode full"


def of_torchtitan(what: str, arguments: str) -> Script:
    """Its own configuration checkpoints selectively: published.py has these."""
    return Script(
        *(f"torchtitan, Llama 3 8B, {what}", "published.py"),
        "trainers.torchtitan ranks=8 commit=f3943dd file=torchtitan/train.py "
        f"config={TITAN} 'arguments={arguments}'",
        world=8,
        origin="runs pytorch/torchtitan at f3943dd, torchtitan/train.py, "
        f"with {arguments}",
    )


SCRIPTS = (
    Script(
        *("nanoGPT, GPT-2 124M, compiled, DDP", "train.py"),
        "config/train_gpt2.py --wandb_log=False --eval_iters=1",
        *("karpathy/nanoGPT", "3adf61e1"),
        ("train.py", "model.py", "configurator.py", "config"),
        *("a100-40", 8, token_files),
    ),
    Script(
        *("torchvision's ViT-B/16, DDP", "imagenet/main.py"),
        "--dummy -a vit_b_16 -b 512 -j 0 --dist-url env:// --world-size 1 --rank 0 "
        "--multiprocessing-distributed",
        *("pytorch/examples", "77f55b91", ("imagenet",)),
        world=8,
    ),
    Script(
        *("torchvision's ResNet-50, DDP", "imagenet/main.py"),
        "--dummy -a resnet50 -b 512 -j 0 --dist-url env:// --world-size 1 --rank 0 "
        "--multiprocessing-distributed",
        *("pytorch/examples", "77f55b91", ("imagenet",)),
        world=8,
    ),
    Script(
        "Lightning's Trainer, a language model",
        "examples/pytorch/basics/transformer.py",
        **LIGHTNING,
    ),
    Script(
        "torchao's float8 recipe, Lightning Fabric, FSDP2, compiled",
        "examples/fabric/fp8_distributed_transformer/train.py",
        world=4,
        **LIGHTNING,
    ),
    of_torchtitan("float8, FSDP2, compiled", FLOAT8),
    of_torchtitan("full checkpointing, FSDP2", FULL),
    of_torchtitan("full checkpointing, FSDP2, compiled", f"{FULL} --training.compile"),
    Script(
        "diffusers' UNet, a loop of accelerate, fp16, EMA",
        "examples/unconditional_image_generation/train_unconditional.py",
        "--train_data_dir images --resolution 64 --train_batch_size 16 --use_ema "
        "--mixed_precision fp16 --output_dir out",
        *("huggingface/diffusers", "v0.37.1"),
        ("examples",),
        world=8,
        make=images,
    ),
    Script(
        *("Qwen3-30B-A3B, 4,096 tokens, FSDP2", "foreign_experts.py", "qwen3"),
        world=16,
        origin="ours, over transformers' Qwen3-MoE",
    ),
    Script(
        *("Mamba-130m, 2 x 128 tokens", "foreign_state_space.py", "mamba 2 128"),
        origin="ours, over transformers' Mamba",
    ),
    Script(
        *("Mamba2-130m, 2 x 2,048 tokens", "foreign_state_space.py", "mamba2 2 2048"),
        origin="ours, over transformers' Mamba2",
    ),
    Script(
        *("LoRA on an 8B Llama, HF Trainer", "foreign_lora.py"),
        origin="ours, over peft and transformers' Trainer",
    ),
)


def measure() -> list[Row]:
    return [row for script in SCRIPTS for row in rows(script)]


def rows(script: Script) -> list[Row]:
    row = rows_of(NAME)
    try:
        reserved, processor = planned(script)
    except Absent as why:
        quantity = f"reserved, {on(script)}"
        return [row("lowtide plan", quantity, None, "GiB", "missing", str(why))]
    seconds = round(processor, 1)
    return [
        reserved,
        row("lowtide plan", f"processor, {on(script)}", seconds, "s", "measured"),
    ]


def rows_alone(script: Script) -> list[Row]:
    return [planned(script)[0]]


def on(script: Script) -> str:
    return f"{script.what}, {script.gpu}, world {script.world or 1}"


def planned(script: Script) -> tuple[Row, float]:
    """What it reserves, with what the plan notes; seconds of processor."""
    plan, processor = plan_of(script)
    said = f"{script.source}. Notes: {'; '.join(plan['notes']) or 'none'}"
    gib = round(plan["peak_reserved"] / GIB, 3)
    reserved = rows_of(NAME)(
        *("lowtide plan", f"reserved, {on(script)}", gib, "GiB", "simulated", said)
    )
    return reserved, processor


def plan_of(script: Script, *options: str) -> tuple[dict[str, Any], float]:
    """Its plan as JSON, with ``options`` of the command; seconds of processor."""
    packages = [foreign("packages")] if script.packages else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        program = str(PROGRAMS / script.program)
        if script.repository:
            repository = script.repository.split("/")[1]
            check_out(repository, script.commit, *script.wanted, into=folder)
            program = script.program
        script.make(folder)
        world = [] if script.world is None else ["--world", str(script.world)]
        command = [
            *(sys.executable, "-W", "ignore", "-m", "lowtide", "plan", *world),
            *("--gpu", script.gpu, "--steps", str(STEPS), "--limit", str(LIMIT)),
            *(*options, "--json", "plan.json", "--output", "printed", "--", program),
            *shlex.split(script.arguments),
        ]
        errors = folder / "errors"
        with errors.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(folder, packages),
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
            _, status, used = os.wait4(process.pid, 0)
        if status != 0:
            said = errors.read_text()[-3000:]
            raise RuntimeError(f"{script.what}: expected a plan, got {status}\n{said}")
        plan = json.loads((folder / "plan.json").read_text())
        places = [(f"{place}/", "") for place in (folder, *packages)]
        plan["notes"] = [shortened(note, places) for note in plan["notes"]]
        return plan, used.ru_utime + used.ru_stime


def shortened(note: str, places: Sequence[tuple[str, str]]) -> str:
    for place, by in places:
        note = note.replace(place, by)
    return note


def environment(folder: Path, packages: Sequence[Path]) -> dict[str, str]:
    """Caches are empty; nothing is fetched."""
    paths = [ENVIRONMENT["PYTHONPATH"], *map(str, packages)]
    return os.environ | {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(paths),
        "TMPDIR": str(folder),
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }


CASE = Case(
    name=NAME,
    describe="Training scripts of others, unedited, planned without a GPU.",
    how=f"""\
`python -m lowtide plan --steps {STEPS} --gpu ... -- SCRIPT`: what the process reserves
of the GPU (*simulated*), the processor's seconds with empty caches (*measured*), and
what the plan notes: sizes that depend on data, and lines that decide by values nobody
computed. Scripts of repositories are the files of the commit that is named; only data
is made here: tokens of 0, words, black images. Where a library has no script that runs
without its hub, the program is ours over its documented interface, and said to be.

Repositories and packages are looked for in the folder that `LOWTIDE_FOREIGN` names:

```sh
python -m pip install --no-deps --target $LOWTIDE_FOREIGN/packages \\
  -r requirements/published.txt
for repository in karpathy/nanoGPT pytorch/examples Lightning-AI/pytorch-lightning \\
  huggingface/diffusers pytorch/torchtitan
do
  git clone https://github.com/$repository $LOWTIDE_FOREIGN/${{repository#*/}}
done
```
""",
    run=measure,
    parts={script.what: partial(rows_alone, script) for script in SCRIPTS},
    only_by_name="wants clones of other repositories",
)
