"""Figures of real devices, links and hosts, for :func:`lowtide.phantom.timeline`.

Datasheet figures are peaks; the shares of them that kernels reach are assumptions,
named with each; docs/time.md has what an H200 took beside them. Replace a field to ask
what another figure would give: ``dataclasses.replace(H100, product_efficiency=0.6)``.
"""

import dataclasses
from dataclasses import dataclass

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6
# PCIe x16 in one direction, of which copies reach 85 % (assumption).
_PCIE4, _PCIE5 = 0.85 * 31.5 * _GIGA, 0.85 * 63 * _GIGA


@dataclass(frozen=True)
class Accelerator:
    """FLOP/s are dense; bytes/s; seconds."""

    name: str
    fp64: float
    fp32: float
    tf32: float
    half: float  # bfloat16 and float16
    eight_bit: float
    memory_bandwidth: float
    # cuBLAS reaches 600 to 750 of 989 TFLOP/s in large bf16 products of an H100
    # (assumption).
    product_efficiency: float = 0.7
    # "FlashAttention-2 achieving only 35% utilization on the H100 GPU": abstract of
    # FlashAttention-3, arXiv 2407.08608.
    attention_efficiency: float = 0.35
    # Copies and elementwise kernels (assumption).
    memory_efficiency: float = 0.9
    # From one kernel's beginning to the next one's, if neither does much (assumption).
    kernel_floor: float = 2 * _MICRO
    host_bandwidth: float = _PCIE5  # each way
    multiprocessors: int = 132
    # How many of a kernel fit on one multiprocessor: what the dry driver answers, too
    # (assumption).
    resident_blocks: int = 2
    # How long a block runs of a kernel whose blocks nobody counted, a library's: a tile
    # of 128 x 256 in half precision over 4096 (assumption).
    block_seconds: float = 50 * _MICRO


def _with_blocks(figures: Accelerator) -> Accelerator:
    tile = 2 * 128 * 256 * 4096
    rate = figures.half * figures.product_efficiency / figures.multiprocessors
    return dataclasses.replace(figures, block_seconds=tile / rate)


# NVIDIA A100 Tensor Core GPU datasheet, SXM columns; 8-bit is INT8, it has no FP8.
# Attention: FlashAttention-2 reaches 50 to 73 % of an A100's peak (its abstract, arXiv
# 2307.08691).
A100_40 = _with_blocks(
    Accelerator(
        name="A100 SXM4 40GB",
        fp64=19.5 * _TERA,
        fp32=19.5 * _TERA,
        tf32=156 * _TERA,
        half=312 * _TERA,
        eight_bit=624 * _TERA,
        memory_bandwidth=1.555 * _TERA,
        attention_efficiency=0.6,
        host_bandwidth=_PCIE4,
        multiprocessors=108,
    )
)
A100_80 = dataclasses.replace(
    A100_40, name="A100 SXM4 80GB", memory_bandwidth=2.039 * _TERA
)
# NVIDIA H100 Tensor Core GPU datasheet, SXM5 column; dense figures are half of those
# it prints with sparsity.
H100 = _with_blocks(
    Accelerator(
        name="H100 SXM5 80GB",
        fp64=67 * _TERA,
        fp32=67 * _TERA,
        tf32=494.7 * _TERA,
        half=989.4 * _TERA,
        eight_bit=1978.9 * _TERA,
        memory_bandwidth=3.35 * _TERA,
        multiprocessors=132,
    )
)
# NVIDIA H200 Tensor Core GPU datasheet, SXM column: the same chip, other memory.
H200 = dataclasses.replace(H100, name="H200 SXM 141GB", memory_bandwidth=4.8 * _TERA)
# NVIDIA's Blackwell architecture brief, HGX B200; half of the figures with sparsity.
B200 = _with_blocks(
    Accelerator(
        name="B200 SXM 180GB",
        fp64=40 * _TERA,
        fp32=80 * _TERA,
        tf32=1100 * _TERA,
        half=2250 * _TERA,
        eight_bit=4500 * _TERA,
        memory_bandwidth=8 * _TERA,
        multiprocessors=148,
    )
)
# NVIDIA L40S datasheet, without sparsity; FP64 is 1/64 of FP32 (Ada whitepaper).
L40S = _with_blocks(
    Accelerator(
        name="L40S 48GB",
        fp64=1.43 * _TERA,
        fp32=91.6 * _TERA,
        tf32=183 * _TERA,
        half=362.05 * _TERA,
        eight_bit=733 * _TERA,
        memory_bandwidth=0.864 * _TERA,
        host_bandwidth=_PCIE4,
        multiprocessors=142,
    )
)
# NVIDIA Ada GPU architecture whitepaper, appendix: dense, accumulated in FP32.
RTX4090 = _with_blocks(
    Accelerator(
        name="GeForce RTX 4090 24GB",
        fp64=1.29 * _TERA,
        fp32=82.6 * _TERA,
        tf32=82.6 * _TERA,
        half=165.2 * _TERA,
        eight_bit=330.3 * _TERA,
        memory_bandwidth=1.008 * _TERA,
        host_bandwidth=_PCIE4,
        multiprocessors=128,
    )
)
ACCELERATORS = {
    "a100-40": A100_40,
    "a100-80": A100_80,
    "h100": H100,
    "h200": H200,
    "b200": B200,
    "l40s": L40S,
    "rtx4090": RTX4090,
}


@dataclass(frozen=True)
class Protocol:
    """How NCCL sends, by its tuning model: seconds, shares of the links' bandwidth."""

    base_latency: float
    hop_in_node: float
    hop_beside_network: float  # in a node, of a ring that leaves it
    hop_between_nodes: float
    share_in_node: float
    share_between_nodes: float
    most: tuple[float, float, float]  # bytes/s in one node, two, more
    # NCCL takes one more channel for each so many bytes of the buffer; the second of
    # them times the ranks.
    channel_bytes: float = 0
    channel_bytes_by_ranks: float = 0
    hop_of_lone_ranks: float = 0  # between nodes of one rank each, if longer


@dataclass(frozen=True)
class Network:
    """Bytes/s of one rank in one direction.

    A collective takes base latency + steps x hop + bytes x (N - 1) / N / bandwidth,
    with N - 1 steps for all-gather and reduce-scatter and twice both for all-reduce, by
    the protocol that NCCL chooses. In several nodes, every card of a node carries a
    ring. [Note: What a group costs] in csrc/phantom/time/collectives.h has the rest.
    """

    bandwidth_in_node: float
    bandwidth_between_nodes: float
    ranks_per_node: int
    rings: tuple[Protocol, ...]
    trees: tuple[Protocol, ...]
    # How many a communicator has; one holds a multiprocessor while it runs.
    channels_in_node: int = 24
    channels_between_nodes: int = 16
    # How many carry what passes between two ranks of a communicator.
    channels_of_pair_in_node: int = 32
    channels_of_pair_between_nodes: int = 2
    channel_bandwidth: float = 25 * _GIGA  # most that one carries
    # Bytes of a connection on the sender's and the receiver's device in a node, and on
    # each one's between nodes: [Note: Buffers of a connection] in nccl_buffers.py.
    send_buffer: int = 2 << 20
    receive_buffer: int = 10 << 20
    network_buffer: int = 10 << 20


@dataclass(frozen=True)
class Host:
    """Seconds that calls cost it (assumptions)."""

    launch: float = 5 * _MICRO  # of a kernel or a copy, with its dispatch
    library_call: float = 8 * _MICRO
    collective: float = 20 * _MICRO
    event: float = 1 * _MICRO
    graph: float = 10 * _MICRO


HOST = Host()


@dataclass(frozen=True)
class _Generation:
    """What NCCL 2.28.9 (torch 2.11 brings it) has of GPUs, GB/s.

    src/graph/tuning.cc: llMaxBws in a node and, for several nodes, of an Intel host;
    perChMaxRingLL128Bws, perChMaxTreeLL128Bws and perChMaxTreeBws in one node, two,
    more, of each channel that src/graph/search.cc finds. It finds so many of them that
    they fill the links, one for each network card between nodes, and runs each as two
    (ncclTopoPostset in src/graph/connect.cc); one that would carry more than 25 GB/s,
    50 from compute capability 8.6 on, is two to begin with (ncclTopoDupChannels), so
    half of that is the most that a channel carries.
    """

    ll_in_node: float
    ring_ll128: tuple[float, float, float]
    tree_ll128: tuple[float, float, float]
    tree: tuple[float, float, float]
    found: tuple[int, int, int]


_AMPERE = _Generation(87.7, (20,) * 3, (20,) * 3, (24, 23.6, 17.8), (12, 8, 8))
_ADA = dataclasses.replace(_AMPERE, found=(1, 1, 1))
_HOPPER = _Generation(141, (36.7,) * 3, (36.7, 36.7, 29), (38.7, 41.4, 36), (12, 8, 8))
_BLACKWELL = _Generation(
    *(282, (73.4, 34.6, 73.4), (55.6, 31.67, 20)), (70, 42.8, 24), (16, 8, 8)
)
_LL_BETWEEN_NODES = (39.0, 20.4)
_NO_LIMIT = (1e15, 1e15, 1e15)


def _protocol(
    latencies: tuple[float, float, float, float, float],
    shares: tuple[float, float],
    most: tuple[float, ...],
    channel_bytes: float,
    channel_bytes_by_ranks: float = 0,
) -> Protocol:
    """Microseconds and GB/s."""
    base, node, beside, between, lone = (each * _MICRO for each in latencies)
    one, two, more = (each * _GIGA for each in most)
    return Protocol(
        *(base, node, beside, between, *shares, (one, two, more)),
        *(channel_bytes, channel_bytes_by_ranks, lone),
    )


def _rings(of: _Generation, hops: tuple[float, float, float]) -> tuple[Protocol, ...]:
    """ncclTopoTuneModel: LL, LL128 and Simple with baseLatencies, the hops given in a
    node, those of NCCL_HW_NET between nodes, a tree's where a node has one rank, and
    getNetOverhead (1 us, 3 for Simple) at least in a node beside the network. Threads a
    channel times bytes a thread: topoGetAlgoInfo in src/enqueue.cc."""
    ll, ll128, simple = hops
    ll_most = (of.ll_in_node, *_LL_BETWEEN_NODES)
    ll128_most = tuple(n * gb for n, gb in zip(of.found, of.ring_ll128, strict=True))
    return (
        _protocol((6.6, ll, max(ll, 1), 2.7, 5), (0.5, 0.5), ll_most, 0, 512 * 8),
        _protocol((14, ll128, ll128, 4, 8.5), (0.92, 0.92), ll128_most, 640 * 8),
        _protocol(
            *((8.4, simple, max(simple, 3), 14, 14), (1, 1), _NO_LIMIT), 512 * 64
        ),
    )


def _trees(of: _Generation, hops: tuple[float, float, float]) -> tuple[Protocol, ...]:
    """The protocols of trees, which have no overhead beside the network."""
    ll, ll128, simple = hops
    most = [n * gb for n, gb in zip(of.found, of.tree, strict=True)]
    lls = zip(most, (of.ll_in_node, *_LL_BETWEEN_NODES), strict=True)
    shares = (7 / 9, 120 / 128, 120 / 128)
    ll128s = zip(most, shares, of.found, of.tree_ll128, strict=True)
    ll_most = [min(each / 3.8, cap) for each, cap in lls]
    ll128_most = [min(each * share, n * gb) for each, share, n, gb in ll128s]
    return (
        _protocol((6.8, ll, ll, 5, 5), (0.92 / 3.8, 0.92 / 3.8), (*ll_most,), 512 * 8),
        _protocol(
            *((14, ll128, ll128, 8.5, 8.5), (0.92 * 7 / 9, 0.92 * 120 / 128)),
            *((*ll128_most,), 640 * 8),
        ),
        _protocol(*((8.4, simple, simple, 14, 14), (0.92, 0.92), (*most,), 512 * 64)),
    )


def _nvlink(of: _Generation, link: float, card: float, channel: float) -> Network:
    """Eight GPUs and as many cards a node. GB/s."""
    in_node, between, _ = (2 * found for found in of.found)
    return Network(
        bandwidth_in_node=link * _GIGA,
        bandwidth_between_nodes=card * _GIGA,
        ranks_per_node=8,
        rings=_rings(of, (0.6, 1.9, 3.4)),
        trees=_trees(of, (0.6, 1.25, 4.0)),
        channels_in_node=in_node,
        channels_between_nodes=between,
        channel_bandwidth=channel * _GIGA,
    )


# Links: so many GB/s each in NCCL's src/graph/topo.h (25, 25 and 50 in datasheets).
# Cards: InfiniBand HDR and NDR, 24 of 25 and 48 of 50 GB/s in src/graph/search.cc, one
# a GPU as in DGX A100, H100 and B200. Pairs, ncclTopoComputeP2pChannels in
# src/graph/paths.cc: two channels a link, up to all; two a card.
# GPUs of an A100's kind read from their peers (ncclTopoCheckP2p in src/graph/paths.cc).
DGX_A100 = dataclasses.replace(
    _nvlink(_AMPERE, link=12 * 20, card=24, channel=12.5),
    send_buffer=6 << 20,
    receive_buffer=6 << 20,
)
DGX = _nvlink(_HOPPER, link=18 * 20.6, card=48, channel=25)
DGX_B200 = _nvlink(_BLACKWELL, link=18 * 40.1, card=48, channel=25)
# GPUs on PCIe 4.0 x16: 24 GB/s in NCCL (src/graph/topo.cc), 20 the next lower speed of
# src/graph/search.cc; LL128 is for NVLink alone. A 100 Gb/s card a GPU (assumption), 12
# GB/s in topo.h. The RTX 4090 reaches others through the host's memory, as fast
# (assumption).
_PCIE_HOPS, _PCIE_TREE_HOPS = (1.0, 2.5, 5.7), (1.0, 1.9, 4.0)
PCIE = Network(
    bandwidth_in_node=20 * _GIGA,
    bandwidth_between_nodes=12 * _GIGA,
    ranks_per_node=8,
    rings=_rings(_ADA, _PCIE_HOPS)[::2],
    trees=_trees(_ADA, _PCIE_TREE_HOPS)[::2],
    channels_in_node=2,
    channels_between_nodes=2,
    channels_of_pair_in_node=2,
    channels_of_pair_between_nodes=2,
)
_NETWORKS = {
    **dict.fromkeys(("a100-40", "a100-80"), DGX_A100),
    **dict.fromkeys(("h100", "h200"), DGX),
    "b200": DGX_B200,
    **dict.fromkeys(("l40s", "rtx4090"), PCIE),
}


def accelerator_named(name: str) -> Accelerator:
    """Raises ValueError for one that is not listed."""
    found = ACCELERATORS.get(name.lower())
    if found is None:
        raise ValueError(
            f"lowtide: phantom.timeline: expected one of {', '.join(ACCELERATORS)}, "
            f"got {name!r}. Pass a lowtide.phantom.machines.Accelerator for others."
        )
    return found


def network_of(name: str) -> Network:
    """The network of machines that have such accelerators; raises ValueError like
    :func:`accelerator_named`."""
    accelerator_named(name)
    return _NETWORKS[name.lower()]


def has_slow_links(name: str) -> bool:
    """Whether gathers among a machine's GPUs take twice as long as lowtide assumes
    before it has timed some (`slow_link` in csrc/shard/policy.h)."""
    return network_of(name).bandwidth_in_node < 300 * _GIGA / 2


def flat(accelerator: Accelerator, network: Network, host: Host) -> list[float]:
    """All figures in the order in which csrc/phantom/time/figures.cpp reads them."""
    a, n = accelerator, network
    figures: list[float] = [
        *(a.fp64, a.fp32, a.tf32, a.half, a.eight_bit),
        *(a.memory_bandwidth, a.product_efficiency, a.attention_efficiency),
        *(a.memory_efficiency, a.kernel_floor, a.host_bandwidth, a.block_seconds),
        *(a.multiprocessors, a.resident_blocks),
        *(n.bandwidth_in_node, n.bandwidth_between_nodes, n.channel_bandwidth),
        *(n.ranks_per_node, n.channels_in_node, n.channels_between_nodes),
        *(n.channels_of_pair_in_node, n.channels_of_pair_between_nodes),
    ]
    for protocols in (n.rings, n.trees):
        figures.append(len(protocols))
        for p in protocols:
            figures += [p.base_latency, p.hop_in_node, p.hop_beside_network]
            figures += [p.hop_between_nodes, p.hop_of_lone_ranks]
            figures += [p.share_in_node, p.share_between_nodes, *p.most]
            figures += [p.channel_bytes, p.channel_bytes_by_ranks]
    h = host
    return [*figures, h.launch, h.library_call, h.collective, h.event, h.graph]
