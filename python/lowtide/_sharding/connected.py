"""All ranks that the meshes of a model connect: those of this rank's meshes, of the
meshes of these, and so on.

[Note: Connected ranks]
Experts may be on other ranks than the rest of a model, more, fewer, or some of them and
others: of six ranks with tensor parallelism over two and experts over three the one
group is 0, 2, 4 and the other 0, 3. What moves a call is then to be the same on all six
([Note: Whose numbers decide] in rank_comparison.h). A rank knows its own meshes alone,
so ranks tell each other, over each mesh, whom they have found and who of these has
spoken, until all who were found have. All ranks of a mesh hear the same and end with it
in the same round; where one mesh contains the others two rounds are enough, and one
mesh alone needs none.
"""

import torch.distributed as dist

from lowtide import _C
from lowtide._sharding.groups import host_channel, ranks_of
from lowtide._sharding.unit import UnitState


def channel_of_all(states: list[UnitState]) -> _C.HostChannel | None:
    """Over all ranks that the meshes of these units connect; None where ranks are not
    compared. Collective over those ranks."""
    meshes: dict[tuple[int, ...], tuple[_C.HostChannel, UnitState]] = {}
    for state in states:
        if state.groups.host is not None:
            meshes.setdefault(ranks_of(state.mesh), (state.groups.host, state))
    if not meshes:
        return None
    channels = {ranks: channel for ranks, (channel, _) in meshes.items()}
    everyone = connected(dist.get_rank(), dist.get_world_size(), channels)
    if everyone in channels:
        return channels[everyone]
    _, state = next(iter(meshes.values()))
    return host_channel(everyone, state.mesh, state.device)


def connected(
    rank: int, world_size: int, channels: dict[tuple[int, ...], _C.HostChannel]
) -> tuple[int, ...]:
    """``channels``: this rank's, by their ranks."""
    found = {each for ranks in channels for each in ranks}
    if len(channels) == 1:
        # Of a mesh's other ranks every unit is on that mesh, too.
        return tuple(sorted(found))
    spoken = {rank}
    open_channels = dict(channels)
    while open_channels:
        mine = [int(i in found) for i in range(world_size)]
        mine += [int(i in spoken) for i in range(world_size)]
        # All are sent before one is waited for, so their order is no matter.
        sent = [(r, channel.maximum(mine)) for r, channel in open_channels.items()]
        for ranks, answer in sent:
            bits = answer.wait()
            theirs = {i for i in range(world_size) if bits[i]}
            heard = {i for i in range(world_size) if bits[world_size + i]}
            if heard == theirs:
                del open_channels[ranks]
            found |= theirs
            spoken |= heard
            if not heard.issuperset(ranks):
                return tuple(sorted(found))  # alone, in a dry run: nobody answers
    return tuple(sorted(found))
