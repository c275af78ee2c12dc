"""The process group of a simulated world."""

import datetime
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lowtide import _phantom


def init_world(
    world: int,
    rank: int = 0,
    *,
    store: Store | None = None,
    timeout: datetime.timedelta | None = None,
) -> None:
    """Initialises ``torch.distributed`` as ``rank`` of ``world`` for the installed
    phantom device.

    In meta mode no other process is needed: the group is torch's ``fake`` one, whose
    collectives move nothing and take time only on a timeline. In exact mode it is gloo
    on the tensors' bytes, with one process a rank; they find each other through
    ``store``, or as ``torchrun`` says.

    Raises RuntimeError before :func:`lowtide.phantom.install`.
    """
    if _phantom.mode() == "meta":
        _init_fake(world, rank)
        return
    if "PHANTOM" not in dist.Backend._plugins:
        dist.Backend.register_backend("phantom", _over_gloo, devices=["cpu", "phantom"])
    if store is None and world == 1:
        store = dist.HashStore()
    dist.init_process_group(
        "phantom", store=store, rank=rank, world_size=world, timeout=timeout
    )


def _init_fake(world: int, rank: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    supported = dist.Backend.backend_capability[dist.Backend.FAKE]
    if "phantom" not in supported:
        supported.append("phantom")
    # Its groups tell the device's timeline; dist.get_backend() says "fake" as before.
    fake = dist.Backend._plugins[dist.Backend.FAKE.upper()]
    dist.Backend._plugins[dist.Backend.FAKE.upper()] = fake._replace(
        creator_fn=_fake_group
    )
    dist.init_process_group(
        dist.Backend.FAKE, store=FakeStore(), rank=rank, world_size=world
    )


def _fake_group(common: Any, options: object) -> _phantom.FakeGroup:
    size = common.group_size
    ranks = common.global_ranks_in_group or range(size)
    return _phantom.FakeGroup(common.group_rank, size, list(ranks))


def _over_gloo(
    store: Store, rank: int, size: int, timeout: datetime.timedelta
) -> _phantom.GlooBackend:
    return _phantom.GlooBackend(
        dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    )
