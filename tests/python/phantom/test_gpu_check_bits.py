"""The program of gpu_check that compares bits: its figures on the CPU, and that it runs
on CUDA, over the dry driver, where they mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bars
import bits
import launch
import measure_llama
import pytest
import torch

from support.gpu_check import check_dry

ON_CPU = {
    bits.AGAIN,
    "lowtide",
    "lowtide, two microbatches",
    "lowtide, offloaded",
    "lowtide, optimizer in backward",
    "lowtide, parameters on the host",
    "lowtide, parameters on the host, stepped on the device",
    "lowtide, units stepped as one tensor",
}
NO_MATRIX = {"matrices": 0, "momenta": 0}


def test_no_bit_differs_on_the_cpu() -> None:
    program = (bits.__file__, "--cpu")
    small = ("--config", "tiny", "--sequence", "64", "--loss", "chunked:2")
    paths = os.pathsep.join(sys.path)
    printed = subprocess.check_output(
        [sys.executable, *program, *small],
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    figures: dict[str, Any] = json.loads(printed.splitlines()[-1])
    none = {"losses": 0, "parameters": 0}
    assert figures["beside FSDP2"] == dict.fromkeys(ON_CPU, none)
    assert figures["Muon beside whole matrices"] == NO_MATRIX
    errors = figures["gradient errors"]
    assert 0 < errors["fused"] < 1e-6 < 1e-4 < errors["exact"]
    assert figures["deferred errors"].keys() == bars.GRADIENT_ERROR.keys()
    assert bars.missed(measure_llama.bits_rows(figures)) == []
    for of_dtype in figures["deferred errors"].values():
        assert min(of_dtype["lowtide"]["hidden"], of_dtype["lowtide"]["weight"]) > 0


SMALL = ("--cpu", "--config", "tiny", "--sequence", "64", "--loss", "chunked:2")


@pytest.mark.slow
@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (4, 2)])
def test_nor_does_one_of_several_ranks(world: int, replicas: int) -> None:
    options = ("--world", world, "--replicas", replicas)
    printed = launch.run_ranks(world, "bits.py", *SMALL, *options, timeout=240)
    figures: dict[str, Any] = json.loads(printed.splitlines()[-1])
    none = {"losses": 0, "parameters": 0}
    assert figures["beside FSDP2"] == dict.fromkeys(ON_CPU, none)
    assert figures["Muon beside whole matrices"] == NO_MATRIX


def test_a_rank_that_fails_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1': raise SystemExit('of rank 1')\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(RuntimeError, match=r"rank 1 of 3: exit 1\nof rank 1"):
        launch.run_ranks(3, str(program), timeout=60)


def test_differences_are_counted() -> None:
    losses = [torch.tensor(1.0), torch.tensor(2.0)]
    parameters = [torch.zeros(3), torch.ones(2, 2)]
    nudged = [losses[0], torch.nextafter(losses[1], torch.tensor(3.0))]
    zeros = [torch.tensor([0.0, -0.0, -0.0]), parameters[1]]
    found = bits.differences(
        bits.Trained(nudged, zeros), bits.Trained(losses, parameters)
    )
    assert found == {"losses": 1, "parameters": 2}


@pytest.mark.slow
def test_it_runs_on_cuda(tmp_path: Path) -> None:
    figures, rows = check_dry(tmp_path, "bits", "graphs")
    captured = {"lowtide, captured", "lowtide, offloaded and captured"}
    assert set(figures["bits"]["beside FSDP2"]) == ON_CPU
    assert set(figures["graphs"]["beside FSDP2"]) == captured
    with_bars = {row["quantity"] for row in rows if row["system"] == "met"}
    assert set(figures["bits"]["Muon beside whole matrices"]) == set(NO_MATRIX)
    # Of ten variants two each, of Muon two, of the fused gradient one; of three
    # dtypes the loss and two gradients.
    assert len(with_bars) == 2 * 10 + 2 + 1 + 3 * 3
    control = {row["system"] for row in rows if bits.AGAIN in row["quantity"]}
    assert control == {"fsdp2", "bar", "met"}
