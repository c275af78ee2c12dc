"""The process group of a simulated world."""

import datetime

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
    collectives move nothing. In exact mode it is gloo on the tensors' bytes, with one
    process a rank; they find each other through ``store``, or as ``torchrun`` says.

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
    dist.init_process_group(
        dist.Backend.FAKE, store=FakeStore(), rank=rank, world_size=world
    )


def _over_gloo(
    store: Store, rank: int, size: int, timeout: datetime.timedelta
) -> _phantom.GlooBackend:
    return _phantom.GlooBackend(
        dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    )
