"""Errors of ranks that waited name the rank that raised first, and what it said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from lowtide._torch_version import VERSION
from lowtide.phantom.dry import launch
from support import hang_dry_run
from support.commands import ENVIRONMENT, end_trees

SCRIPT = Path(__file__).parent / "scripts/failing_rank.py"
WORLD = 3
HANG = "30"  # of rank 0's collectives
# What torch's watchdog says when it ends a process.
ENDS_IT = (
    "Watchdog caught collective operation"
    if VERSION < (2, 15)
    else "Aborting process on rank 0 due to timeout"
)
RAISED = "; rank 1 raised first: 'ValueError: token 7 of 5'. "


def agents_store() -> dist.TCPStore:
    """One that outlives rank 0, as torchrun's."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def run_gloo_ranks(port: int, **environment: str) -> list[tuple[int, str]]:
    of_all = os.environ | ENVIRONMENT | environment
    of_all |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return run_ranks(
        [[str(SCRIPT)]] * WORLD,
        [
            of_all | {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
            for rank in range(WORLD)
        ],
    )


def run_nccl_ranks(
    port: int, seconds: int, *raises: str, **environment: str
) -> list[tuple[int, str]]:
    """Two, over the dry driver: of rank 0 a gather in its second step never
    finishes; rank 1 ``raises`` before that."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH")}
    of_all = launch.environment(launch.Machine(memory=8 << 30), base) | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        # Else torch sleeps for a minute before it ends the process.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    }
    words = (str(port), str(seconds))
    return run_ranks(
        [
            [hang_dry_run.__file__, "0", *words],
            [hang_dry_run.__file__, "1", *words, *raises],
        ],
        [of_all | {"LOWTIDE_DRY_HANG": HANG} | environment, of_all | environment],
    )


def run_ranks(
    programs: list[list[str]], environments: list[dict[str, str]]
) -> list[tuple[int, str]]:
    """Each rank's status and what it wrote to stderr."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        for program, environment in zip(programs, environments, strict=True)
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
    store = agents_store()
    found = run_gloo_ranks(
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
        assert f"(rank {rank} of 3){RAISED}" in last, found[rank][1]
    assert "raised first" not in found[1][1]


def complaints(error: str) -> list[str]:
    return [
        line
        for line in error.splitlines()
        if line.startswith("lowtide: ") and " to finish on all ranks, got it " in line
    ]


def test_the_first_to_raise_is_named_where_nccl_does_not_finish():
    """Without anything that raises on the host, and long before the timeout."""
    store = agents_store()
    found = run_nccl_ranks(store.port, 12, "raise", LOWTIDE_COMPARE_RANKS="off")
    (status, said), (other, _) = found
    assert status == -signal.SIGABRT  # torch's watchdog
    assert other == 1
    first, *_ = complaints(said)
    assert first.startswith(
        "lowtide: layers.0: expected the all-gather of 24704 bytes to finish on all "
        "ranks, got it unfinished "
    ), said
    assert "(rank 0 of 2); " in first
    assert f"its group's timeout is 12 s{RAISED}" in first
    assert said.index(first) < said.index(ENDS_IT)


@pytest.mark.slow
def test_a_collective_that_nears_its_timeout_is_named():
    """Where nobody has raised."""
    store = agents_store()
    (status, said), _ = run_nccl_ranks(store.port, 6, LOWTIDE_COMPARE_RANKS="off")
    assert status == -signal.SIGABRT
    gather, reduction = complaints(said)  # which waits for it
    assert gather.startswith("lowtide: layers.0: expected the all-gather of ")
    assert reduction.startswith("lowtide: layers.0: expected the reduce-scatter of ")
    assert "raised first" not in gather + reduction
    assert said.index(gather) < said.index(ENDS_IT)


@pytest.mark.slow
def test_what_a_host_compares_names_it_beside_nccl():
    store = agents_store()
    (status, said), _ = run_nccl_ranks(store.port, 60, "raise")
    assert status == 1
    raised = "RuntimeError: lowtide: comparing what ranks did: expected all ranks "
    assert raised in said
    assert f"(rank 0 of 2){RAISED}" in said
