"""torch's watchdog of NCCL, which goes by the wall's clock, in a dry run."""

from __future__ import annotations

import pytest
import torch

from lowtide.phantom.dry import launch
from support.dry_process import call_dry

TIMEOUT = 4  # seconds, of the group


def late_to_wait() -> float:
    """The host waits for a collective when its timeout is long over."""
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0)
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)
    tensor = torch.ones(4, device=device)
    dist.all_reduce(tensor)
    time.sleep(3 * TIMEOUT)
    return float(tensor[0])


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_a_program_whose_host_is_slow_to_wait_is_not_ended():
    environment = {
        "LOWTIDE_DRY_EVENTS": "at_sync",
        "LOWTIDE_DRY_PATIENCE": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",  # before it ends the process
    }
    machine = launch.Machine(world=8)
    assert call_dry(late_to_wait, machine=machine, environment=environment) == 1
