"""An optimizer's step ends when what is done holds no memory.

The watchdog of ``ProcessGroupNCCL`` lets go of the tensors of a collective that is
done, and looks every 100 ms of the wall's clock. A step on a GPU takes longer; here it
may not, and DDP's first buckets would live for as long as this machine is quick. That
of ``ProcessGroupNCCL2`` (torch 2.14) lets go of only what nobody waits for.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import driver


def install() -> None:
    """For the rest of the process. Where events are done at the next wait of the host,
    so are collectives, and nobody waits here."""
    if os.environ.get("LOWTIDE_DRY_EVENTS", "immediate") == "immediate":
        register_optimizer_step_post_hook(_settle)


def _settle(*_: Any) -> None:
    if not dist.is_initialized() or _is_capturing():
        return
    device = torch.device("cuda")
    for group in dist.distributed_c10d._world.pg_map:
        if device not in group._device_types:
            continue
        if isinstance(group._get_backend(device), dist.ProcessGroupNCCL):
            driver.settle()
            group._wait_for_pending_works()


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
