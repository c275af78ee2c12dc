"""torch's watchdog of NCCL, which goes by the wall's clock, in a dry run."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import lowtide
from lowtide.phantom.dry import driver, launch
from support.dry_process import call_dry

TIMEOUT = 4  # seconds, of the group
ENVIRONMENT = {
    "LOWTIDE_DRY_EVENTS": "at_sync",
    "LOWTIDE_DRY_PATIENCE": "1",
    # Before it ends the process.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}

pytestmark = pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")


def start() -> torch.device:
    device = torch.device("cuda", 0)
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)
    return device


def late_to_wait() -> float:
    """The host waits for a collective when its timeout is long over."""
    tensor = torch.ones(4, device=start())
    dist.all_reduce(tensor)
    time.sleep(3 * TIMEOUT)
    return float(tensor[0])


def test_a_program_whose_host_is_slow_to_wait_is_not_ended():
    machine = launch.Machine(world=8)
    assert call_dry(late_to_wait, machine=machine, environment=ENVIRONMENT) == 1


def gathered_weights() -> int:
    """A forward whose gather has no collective behind it; which one it is, from 1."""
    device = start()
    weights = (torch.nn.Linear(2048, 2048, False, device=device) for _ in range(2))
    model = lowtide.fully_shard(torch.nn.Sequential(*weights))
    with torch.no_grad():
        model(torch.ones(1, 2048, device=device))
    torch.cuda.synchronize()
    gathers = [call.bytes for call in driver.calls() if call.kind == "all_gather"]
    first = gathers.index(2 << 20)
    assert gathers[first:] == [2 << 20] * 2
    return first + 1


def test_weights_whose_gather_never_finishes_end_the_program():
    """Also where they are one launch for several calls of torch's group."""
    machine = launch.Machine(world=8)
    number = call_dry(gathered_weights, machine=machine, environment=ENVIRONMENT)
    hangs = ENVIRONMENT | {"LOWTIDE_DRY_HANG": str(number)}
    with pytest.raises(AssertionError, match=f"exit status -{signal.SIGABRT:d}"):
        call_dry(gathered_weights, machine=machine, environment=hangs)
