"""examples/frameworks under `python -m lowtide run`, unedited, beside FSDP2: what they
print, the digest of their parameters among it, and what is reported of them.

accelerate, torchtitan and verl take an accelerator for granted; programs of support/
take CPUs for one before they run the script.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import verl_on_cpus
from support.commands import ENVIRONMENT, one_agent
from support.titan_on_cpus import HAS_CONFIGS
from support.transformers_versions import SHARDS, SHARDS_NOT

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/frameworks"
SUPPORT = ROOT / "tests/python/support"
LEAVE = Path(__file__).parent / "scripts/leave_at_exit.py"


@dataclass(frozen=True)
class Example:
    root: str  # the class of the model that is reported
    lines: int  # of losses
    launcher: str = ""  # of support/
    models: int = 2  # the one that was saved and the one that resumed
    again: tuple[str, ...] = ()  # what another run, which resumes, is told


CASES = {
    "accelerate": Example("Sequential", 16 // 2, "accelerate_on_cpus.py"),
    "transformers": Example("LlamaForCausalLM", 12, "accelerate_on_cpus.py"),
    "transformers_sharded": Example("LlamaForCausalLM", 9),
    "lightning": Example("Transformer", 8),
    "torchtitan": Example("Transformer", 4, "titan_on_cpus.py"),
    "torchtitan_0_3": Example("Llama3Model", 6, "titan_on_cpus.py", again=("6",)),
    "peft": Example("PeftModel", 8),
    "verl": Example("Qwen2ForCausalLM", 8, "verl_on_cpus.py"),
}
TITANS = {"torchtitan": False, "torchtitan_0_3": True}


def skip_what_is_not_here(name: str) -> None:
    if name == "transformers_sharded" and not SHARDS:
        pytest.skip(SHARDS_NOT)
    if name == "verl" and not verl_on_cpus.is_here():
        pytest.skip(verl_on_cpus.MISSING)
    if TITANS.get(name, HAS_CONFIGS) is not HAS_CONFIGS:
        pytest.skip("another torchtitan is installed")


def run(
    name: str, folder: Path, *options: str, **environment: str
) -> tuple[list[str], list[str]]:
    """What rank 0 prints of the training, and what is said on the standard error, in
    all runs that it takes to resume."""
    printed, said = run_once(name, folder, *options, **environment)
    if again := CASES[name].again:
        more = run_once(name, folder, *options, arguments=again, **environment)
        printed, said = printed + more[0], said + more[1]
    return printed, said


def run_once(
    name: str,
    folder: Path,
    *options: str,
    arguments: tuple[str, ...] = (),
    **environment: str,
) -> tuple[list[str], list[str]]:
    launcher = CASES[name].launcher
    done = subprocess.run(
        [
            *one_agent(2),
            *options,
            str(LEAVE),
            *([str(SUPPORT / launcher)] if launcher else []),
            str(EXAMPLES / f"with_{name}.py"),
            str(folder),
            *arguments,
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | ENVIRONMENT | environment,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    printed = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("loss ", "step ", "parameters "))
    ]
    return printed, done.stderr.splitlines()


@pytest.fixture(scope="module")
def with_fsdp2(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], list[str]]:
    """What an example prints of the training, run once."""

    @functools.cache
    def printed(name: str) -> list[str]:
        return run(name, tmp_path_factory.mktemp("fsdp2") / name)[0]

    return printed


def test_every_example_is_here():
    scripts = {path.stem for path in EXAMPLES.glob("with_*.py")}
    assert scripts == {f"with_{name}" for name in CASES}
    for path in EXAMPLES.glob("*.py"):
        assert "import lowtide" not in path.read_text()


@pytest.mark.slow("frameworks")
@pytest.mark.parametrize("name", CASES)
def test_runs_unedited_with_the_bits_of_fsdp2(tmp_path, with_fsdp2, name):
    skip_what_is_not_here(name)
    theirs = with_fsdp2(name)
    ours, said = run(name, tmp_path / "lowtide", "-m", "lowtide", "run")
    assert sum(" " in line and "loss" in line for line in ours) == CASES[name].lines
    assert ours[-1].startswith("parameters ")
    assert ours == theirs
    if CASES[name].again:
        steps = [line.split()[1] for line in ours if line.startswith("step ")]
        assert steps == [str(1 + step) for step in range(6)]  # none twice
    # On rank 0 alone.
    assert said.count(f"lowtide: run: {CASES[name].root}") == CASES[name].models
    assert said.count("lowtide memory on cpu (this rank)") == CASES[name].models


@pytest.mark.slow("frameworks")
def test_verl_imports_lowtide_by_itself(tmp_path, with_fsdp2):
    skip_what_is_not_here("verl")
    theirs = with_fsdp2("verl")
    module = "lowtide.integrations.verl"
    ours, said = run("verl", tmp_path / "lowtide", VERL_USE_EXTERNAL_MODULES=module)
    assert ours == theirs
    bound = "lowtide: run: fully_shard of verl.utils.fsdp_utils was lowtide's"
    assert said.count(bound) == 1
    assert said.count("lowtide: run: Qwen2ForCausalLM") == 2


@pytest.mark.slow("frameworks")
def test_verl_beside_other_features(tmp_path, with_fsdp2):
    """Steps on all ranks or none, freed bytes that are NaN, and a head that may leave
    its logits out, of which verl's log probabilities take all."""
    skip_what_is_not_here("verl")
    theirs = with_fsdp2("verl")
    options = ("-m", "lowtide", "run", "--all-or-nothing", "--defer-logits")
    ours, said = run("verl", tmp_path / "lowtide", *options, LOWTIDE_DEBUG="1")
    assert ours == theirs
    steps = "lowtide: run: --all-or-nothing: 8 optimizer steps happened; 0 were undone"
    assert sum(line.startswith(steps) for line in said) == 1
    heads = [line for line in said if line.startswith("lowtide: run: --defer-logits:")]
    assert heads and all("0 losses without logits" in line for line in heads)


def numbers_of(lines: list[str]) -> list[float]:
    words = " ".join(line for line in lines if "loss" in line).split()
    return [float(word) for word in words if word.replace(".", "", 1).isdecimal()]


@pytest.mark.slow("frameworks")
@pytest.mark.parametrize("name", ["accelerate", "transformers", "torchtitan", "peft"])
def test_logits_are_deferred_unedited(tmp_path, with_fsdp2, name):
    """Some of them compute in bf16, in which a step later the last bit differs.
    torchtitan's from 0.3 on come by chunks, of a head with a forward of its own."""
    skip_what_is_not_here(name)
    theirs = with_fsdp2(name)
    options = ("-m", "lowtide", "run", "--defer-logits")
    ours, said = run(name, tmp_path / "lowtide", *options)
    assert numbers_of(ours) == pytest.approx(numbers_of(theirs), rel=5e-2)
    assert len(numbers_of(ours)) >= 2 * CASES[name].lines
    heads = [line for line in said if line.startswith("lowtide: run: --defer-logits:")]
    assert [line.split(", ")[-1] for line in heads[-2:]] == ["logits made 0 times"] * 2
    assert not any(" 0 calls" in line for line in heads)


@pytest.mark.slow("frameworks")
def test_a_head_with_a_forward_of_its_own_is_refused(tmp_path):
    """As torchtitan 0.3's on its default backend."""
    skip_what_is_not_here("torchtitan_0_3")
    refused = "expected Llama3Model.lm_head to be an nn.Linear with its class's forward"
    with pytest.raises(AssertionError, match=refused):
        run_once("torchtitan_0_3", tmp_path, "-m", "lowtide", "run", "--defer-logits")
