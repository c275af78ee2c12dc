"""Figures of real devices and links, for :func:`lowtide.phantom.timeline`.

Datasheet figures are peaks; the shares of them that kernels reach are assumptions,
named with each. Replace a field to ask what another figure would give:
``dataclasses.replace(H100, product_efficiency=0.6)``.
"""

import dataclasses
from dataclasses import dataclass

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


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
    # cuBLAS reaches 600 to 750 of 989 TFLOP/s in large bf16 products (assumption).
    product_efficiency: float = 0.7
    # "FlashAttention-2 achieving only 35% utilization on the H100 GPU": abstract of
    # FlashAttention-3, arXiv 2407.08608.
    attention_efficiency: float = 0.35
    # Copies and elementwise kernels on HBM3 (assumption).
    memory_efficiency: float = 0.9
    # From one kernel's beginning to the next one's, if neither does much (assumption).
    kernel_floor: float = 2 * _MICRO
    # PCIe 5.0 x16, 63 GB/s, of which copies reach 85 % (assumption).
    host_bandwidth: float = 0.85 * 63 * _GIGA
    multiprocessors: int = 132
    resident_blocks: int = 2  # of a kernel, on one multiprocessor (assumption)
    # How long a block of a kernel runs whose blocks nobody counted (assumption).
    block_seconds: float = 20 * _MICRO


# NVIDIA H100 Tensor Core GPU datasheet, SXM5 column; dense figures are half of those
# it prints with sparsity.
H100 = Accelerator(
    name="H100 SXM5 80GB",
    fp64=67 * _TERA,
    fp32=67 * _TERA,
    tf32=494.7 * _TERA,
    half=989.4 * _TERA,
    eight_bit=1978.9 * _TERA,
    memory_bandwidth=3.35 * _TERA,
)
# NVIDIA H200 Tensor Core GPU datasheet, SXM column: the same chip, other memory.
H200 = dataclasses.replace(H100, name="H200 SXM 141GB", memory_bandwidth=4.8 * _TERA)
ACCELERATORS = {"h100": H100, "h200": H200}


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


@dataclass(frozen=True)
class Network:
    """Bytes/s of one rank in one direction.

    A collective takes base latency + steps x hop + bytes x (N - 1) / N / bandwidth,
    with N - 1 steps for all-gather and reduce-scatter and twice both for all-reduce, by
    the fastest protocol. In several nodes, every card of a node carries a ring.
    """

    bandwidth_in_node: float
    bandwidth_between_nodes: float
    ranks_per_node: int
    rings: tuple[Protocol, ...]
    trees: tuple[Protocol, ...]
    channels_in_node: int = 16
    channels_between_nodes: int = 16
    channels_of_pair_in_node: int = 2
    channels_of_pair_between_nodes: int = 2
    channel_bandwidth: float = 20 * _GIGA  # most that one carries


@dataclass(frozen=True)
class Host:
    """Seconds that calls cost it (assumptions)."""

    launch: float = 5 * _MICRO  # of a kernel or a copy, with its dispatch
    library_call: float = 8 * _MICRO
    collective: float = 20 * _MICRO
    event: float = 1 * _MICRO
    graph: float = 10 * _MICRO


_NO_LIMIT = (1e15, 1e15, 1e15)
_CHANNELS = 16
_LL_MOST = (87.7 * _GIGA, 39.0 * _GIGA, 20.4 * _GIGA)
_LL128_MOST = (_CHANNELS * 36.7 * _GIGA,) * 3


def _protocol(
    microseconds: tuple[float, float, float, float],
    shares: tuple[float, float],
    most: tuple[float, float, float],
) -> Protocol:
    base, node, beside, between = (each * _MICRO for each in microseconds)
    return Protocol(base, node, beside, between, *shares, most)


# NCCL, src/graph/tuning.cc, ncclTopoTuneModel: latencies of rings and trees over
# NVLink and the network for LL, LL128 and Simple, bandwidth corrections of Hopper with
# an Intel host, 1 us of overhead for every step beside the network (3 for Simple).
RINGS = (
    _protocol((6.6, 0.6, 1.0, 2.7), (1 / 3, 1 / 4), _LL_MOST),
    _protocol((14.0, 1.9, 1.9, 4.0), (0.92, 0.92), _LL128_MOST),
    _protocol((8.4, 3.4, 3.4, 14.0), (1.0, 1.0), _NO_LIMIT),
)
TREES = (
    _protocol((6.8, 0.6, 1.0, 5.0), (0.92 / 3.8, 0.92 / 3.8), _LL_MOST),
    _protocol((14.0, 1.25, 1.9, 8.5), (0.92 * 7 / 9, 0.92 * 120 / 128), _LL128_MOST),
)
# NVLink 4, 18 links a GPU: 25 GB/s each in a datasheet (900 GB/s both ways together),
# 20.6 in NCCL's src/graph/topo.h. InfiniBand NDR, 400 Gb/s and one card a GPU as in a
# DGX H100: 50 GB/s, 48 in NCCL's src/graph/search.cc.
NVLINK4 = 18 * 20.6 * _GIGA
INFINIBAND_NDR = 48 * _GIGA
DGX = Network(
    bandwidth_in_node=NVLINK4,
    bandwidth_between_nodes=INFINIBAND_NDR,
    ranks_per_node=8,
    rings=RINGS,
    trees=TREES,
)

HOST = Host()


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
    """Of a machine that has such accelerators."""
    return DGX


def flat(accelerator: Accelerator, network: Network, host: Host) -> list[float]:
    """All figures in the order in which csrc/phantom/driver/report_time.cpp reads
    them."""
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
        for protocol in protocols:
            *numbers, most = dataclasses.astuple(protocol)
            figures += [*numbers, *most]
    return [*figures, *dataclasses.astuple(host)]
