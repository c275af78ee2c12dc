"""What NCCL's communicators take of a device beside torch's allocator: arithmetic.

[Note: Buffers of a connection]
NCCL connects a channel to its neighbours when a call first needs the algorithm
(ncclCollPreconnect in src/group.cc), and each connection has buffers of every
protocol: 512 KiB for LL, 4,800 KiB for LL128, 4 MiB for Simple (computeBuffSizes in
src/init.cc), in granules of 2 MiB. In a node the receiver has them and the sender a
granule, or, between GPUs that read from their peers, the sender those of Simple
(p2pSendSetup and p2pRecvSetup in src/transport/p2p.cc). Over the network both have
them (src/transport/net.cc).

A ring has a neighbour on either side and sends one way. A tree is a chain within a
node, which sends both ways; one rank of the node has up to three neighbours in others.
Between two ranks of a node there is a connection for each channel and direction; all
pairs of ranks in different nodes share a pool each way (sharedNetBuffersInit).

Left out: the kernels' code, NVLS, registered buffers, and what a communicator takes
before it connects. One that was destroyed counts on. docs/plan.md has what was reported
of real ones.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.phantom.machines import Network

_RINGS = {"all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "all_reduce"}
# NCCL_SHARED_STEPS chunks of 128 KiB for each channel (computeBuffSizes).
_POOL_OF_A_CHANNEL = 16 * (128 << 10)


@dataclass(frozen=True)
class Communicator:
    group: str  # what torch calls it
    ranks: int
    bytes: int  # of this rank's device


def communicators(logged: Mapping[str, Any], network: Network) -> list[Communicator]:
    """Those of ``lowtide.phantom.dry.calls.collect()`` that took something, in the
    order in which they were made."""
    calls: dict[int, list[Mapping[str, Any]]] = {}
    for call in logged["calls"]:
        calls.setdefault(call["communicator"], []).append(call)
    found = []
    for each in logged["communicators"]:
        if each["number"] < 0:  # objects, no communicator of NCCL's
            continue
        asked = calls.get(each["number"], [])
        size = bytes_of(each["ranks"], each["rank"], asked, network)
        if size:
            name = each["purpose"] or each["name"]
            found.append(Communicator(name, each["size"], size))
    return found


def bytes_of(
    ranks: tuple[int, ...],
    rank: int,
    calls: Iterable[Mapping[str, Any]],
    network: Network,
) -> int:
    """Of the device of one rank, for one communicator. ``ranks`` are those of the
    world, ``rank`` its place among them; ``calls`` have a ``kind``, a ``peer`` and,
    where it is made, ``most_ctas``."""
    if len(ranks) == 1:
        return 0
    nodes = [each // network.ranks_per_node for each in ranks]
    in_node = [place for place, node in enumerate(nodes) if node == nodes[rank]]
    leaves = len(in_node) < len(ranks)
    channels = network.channels_between_nodes if leaves else network.channels_in_node
    kinds, peers = set(), set[int]()
    for call in calls:
        kinds.add(call["kind"])
        if call["kind"] in ("init", "split") and call["most_ctas"] > 0:
            channels = min(channels, call["most_ctas"])
        elif call["kind"] in ("send", "recv"):
            peers.add(call["peer"])
        elif call["kind"] == "all_to_all":
            peers.update(range(len(ranks)))
    peers.discard(rank)
    own = len(in_node)
    total = 0
    if kinds & _RINGS:
        total += channels * _of_ring(own, leaves, network)
    if "all_reduce" in kinds:
        total += channels * _of_tree(in_node.index(rank), own, leaves, network)
    near = len(peers.intersection(in_node))
    total += near * network.channels_of_pair_in_node * _both(network)
    if len(peers) > near:
        total += 2 * network.channels_of_pair_in_node * _POOL_OF_A_CHANNEL
    return total


def _both(network: Network) -> int:
    return network.send_buffer + network.receive_buffer


def _of_ring(own: int, leaves: bool, network: Network) -> int:
    """Of one channel. By one rank of the node it leaves, by another it enters: each
    rank is that one in as many channels."""
    if not leaves:
        return _both(network)
    return ((own - 1) * _both(network) + 2 * network.network_buffer) // own


def _of_tree(place: int, own: int, leaves: bool, network: Network) -> int:
    """Of one channel, beside a ring's connections, which are the chain's one way."""
    if leaves:
        chain = (own - 1) * _both(network)
        return (chain + 3 * 2 * network.network_buffer) // own
    if own == 2:
        return 0  # the ring's are there both ways
    receives = network.receive_buffer if place < own - 1 else 0
    return receives + (network.send_buffer if place > 0 else 0)
