"""One launch of NCCL gathers a unit's weights, whichever of torch's groups it is."""

from __future__ import annotations

import pytest
import torch

from lowtide._torch_version import VERSION
from lowtide.phantom.dry import launch
from support.dry_process import call_dry

BACKENDS = (
    ("nccl", "nccl2", "nccl-lazy", "nccl-legacy") if VERSION >= (2, 15) else ("nccl",)
)
WIDTH = 2048  # small weights travel as one tensor
NONBLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}

pytestmark = pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")


def gathers_of_a_step(backend: str) -> list[tuple[int, int]]:
    """(bytes, group) of each all-gather of weights in one step."""
    import torch
    import torch.distributed as dist

    import lowtide
    from lowtide.phantom.dry import driver

    dist.init_process_group(backend, device_id=torch.device("cuda", 0))
    weights = (torch.nn.Linear(WIDTH, WIDTH, False, device="cuda") for _ in range(2))
    model = lowtide.fully_shard(torch.nn.Sequential(*weights))
    before = driver.num_calls()
    model(torch.ones(1, WIDTH, device="cuda")).sum().backward()
    return [
        (call.bytes, call.group)
        for call in driver.calls()[before:]
        if call.kind == "all_gather" and (call.bytes > WIDTH or not call.bytes)
    ]


def found_of(
    backend: str, environment: dict[str, str] | None = None
) -> list[tuple[int, int]]:
    return call_dry(
        gathers_of_a_step,
        backend,
        machine=launch.Machine(world=8),
        environment=environment,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_one_launch_and_nothing_empty_travels(backend):
    found = found_of(backend)
    assert [num_bytes for num_bytes, _ in found] == [4 * WIDTH * WIDTH // 8] * 2
    groups = {group for _, group in found}
    assert len(groups) == 1
    assert groups != {0}


@pytest.mark.skipif(VERSION < (2, 15), reason="torch groups lists itself")
def test_where_a_communicator_does_not_block_each_is_launched_by_itself():
    groups = [group for _, group in found_of("nccl2", NONBLOCKING)]
    assert groups == [0, 0]
