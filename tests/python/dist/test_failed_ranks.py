"""Errors of ranks that waited name the rank that raised first, and what it said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from support.commands import ENVIRONMENT, end_trees

SCRIPT = Path(__file__).parent / "scripts/failing_rank.py"
WORLD = 3


def run_ranks(port: int, **environment: str) -> list[tuple[int, str]]:
    """Each rank's status and what it wrote to stderr."""
    of_all = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)} | environment
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | ENVIRONMENT
            | of_all
            | {"RANK": str(rank), "WORLD_SIZE": str(WORLD)},
            start_new_session=True,
        )
        for rank in range(WORLD)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
        return [
            (process.returncode, error)
            for process, error in zip(processes, errors, strict=True)
        ]
    finally:
        end_trees([process.pid for process in processes])


@pytest.mark.parametrize("compare", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_the_first_to_raise_is_named(compare):
    """Its text is kept by an agent, as torchrun's."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    found = run_ranks(
        store.port,
        TORCHELASTIC_USE_AGENT_STORE="True",
        LOWTIDE_COMPARE_RANKS=compare,
    )
    assert all(status != 0 for status, _ in found)
    for rank in (0, 2):
        (last,) = [
            line
            for line in found[rank][1].splitlines()
            if "RuntimeError: lowtide: " in line
        ]
        named = "; rank 1 raised first: 'ValueError: token 7 of 5'. "
        assert f"(rank {rank} of 3){named}" in last, found[rank][1]
    assert "raised first" not in found[1][1]
