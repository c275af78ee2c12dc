"""torchtitan's own trainer over the dry driver beside what it took on an H200."""

from __future__ import annotations

import json

import check
import launch
import measure_trainer
import pytest
from scale import FULL

from lowtide.phantom.dry.launch import Machine
from support import titan_on_cpus
from support.gpu_check import ROOT

STORED = ROOT / "benchmarks/results/gpu_check"
# Quick, so that `make test TORCH=2.11` has one of them.
QUICK = f"lowtide, {measure_trainer.DEFERRED}"


@pytest.mark.skipif(
    titan_on_cpus.HAS_CONFIGS, reason="the H200 had torchtitan 0.2, of torch 2.11"
)
@pytest.mark.parametrize(
    "system",
    [
        pytest.param(system, marks=[] if system == QUICK else pytest.mark.slow)
        for system in measure_trainer.SYSTEMS
    ],
)
def test_eager_it_takes_as_much_to_the_byte(system: str) -> None:
    call = measure_trainer.call_of(system, "eager", FULL)
    said = launch.run(*map(str, call), machine=Machine(gpu="h200"), timeout=400)
    dry = measure_trainer.peaks_of(json.loads(said.splitlines()[-1]))
    assert dry == check.kept(STORED, "trainer-eager")[system]["CUDA"]
