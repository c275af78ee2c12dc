"""The process group of a simulated world."""

import torch.distributed as dist


def init_world(world: int, rank: int = 0) -> None:
    """Initialises ``torch.distributed`` as ``rank`` of ``world`` for the installed
    phantom device.

    In meta mode no other process is needed: the group is torch's ``fake`` one, whose
    collectives move nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    supported = dist.Backend.backend_capability[dist.Backend.FAKE]
    if "phantom" not in supported:
        supported.append("phantom")
    dist.init_process_group(
        dist.Backend.FAKE, store=FakeStore(), rank=rank, world_size=world
    )
