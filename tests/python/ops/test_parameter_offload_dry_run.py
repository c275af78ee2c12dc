"""``CPUOffloadPolicy`` on torch's CUDA over the dry driver: what is where, and when the
host waits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support import parameter_offload_dry_run
from support.dry_cuda import run_dry

MEMORY = 40 << 30
PROGRAM = parameter_offload_dry_run.__file__


def run(what: str) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads(
        run_dry([PROGRAM, what], memory=MEMORY, events="at_sync")
    )
    return printed


@pytest.mark.slow
def test_it_reserves_less_than_fsdp2_and_the_host_waits_as_rarely() -> None:
    ours, theirs = run("lowtide"), run("fsdp2")
    assert ours["reserved"] < theirs["reserved"]
    assert ours["held"] == theirs["held"]  # between steps: of the program, of cuBLAS
    assert ours["pinned"] <= theirs["pinned"]
    assert ours["in forward"] == ours["in backward"] == 0


def test_a_model_that_moves_and_what_is_refused() -> None:
    found = run("moves")
    assert found["on the device"] == (
        "lowtide: unit 'Llama': expected parameters on cpu with CPUOffloadPolicy, got "
        "tok_embeddings.weight on cuda:0, norm.weight on cuda:0, output.weight on "
        "cuda:0. Call model.to('cpu') before the forward."
    )
    assert found["of rows"] == "cpu"
    assert found["pinned"] == [True, True]
    assert found["norm"] == "cuda"
    assert found["captured"] == (
        "lowtide: offload_policy: expected steps outside of a graph capture, got one "
        "inside. The host has a part in every step of an offloaded model: run it "
        "without a graph."
    )
