"""Figures of machines: every GPU of the dry driver has them, and NCCL's are NCCL's."""

import dataclasses
import re

import pytest

from lowtide.phantom import machines
from lowtide.phantom.dry.launch import GPUS


def test_every_gpu_of_the_driver_has_figures():
    assert tuple(machines.ACCELERATORS) == GPUS
    for name in GPUS:
        figures = machines.accelerator_named(name)
        assert machines.accelerator_named(name.upper()) is figures
        numbers = dataclasses.astuple(figures)[1:]
        assert all(number > 0 for number in numbers), name
        assert figures.fp64 <= figures.fp32 <= figures.tf32 < figures.half
        assert figures.eight_bit == pytest.approx(2 * figures.half, rel=0.02)
        machines.network_of(name)


def test_one_that_is_not_listed_is_named():
    message = (
        "lowtide: phantom.timeline: expected one of a100-40, a100-80, h100, h200, "
        "b200, l40s, rtx4090, got 'tpu'. Pass a lowtide.phantom.machines.Accelerator "
        "for others."
    )
    for ask in (machines.accelerator_named, machines.network_of):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            ask("tpu")


def test_channels_are_those_of_published_logs():
    """NVIDIA/nccl issues 1538 (16, two nodes of eight Hopper GPUs) and 1646 (32, eight
    B200); 24 on eight H100 or A100 of one node follow from src/graph/search.cc."""
    assert machines.DGX.channels_in_node == 24
    assert machines.DGX.channels_between_nodes == 16
    assert machines.DGX_A100.channels_in_node == 24
    assert machines.DGX_B200.channels_in_node == 32


@pytest.mark.parametrize("name", GPUS)
def test_all_channels_together_carry_what_the_links_do(name):
    network = machines.network_of(name)
    carried = network.channel_bandwidth * network.channels_in_node
    assert carried >= network.bandwidth_in_node
    cards = min(8 * network.bandwidth_between_nodes, network.bandwidth_in_node)
    assert network.channel_bandwidth * network.channels_between_nodes >= cards


def test_protocols_of_nvlink_on_hopper():
    """Figures of ncclTopoTuneModel, NCCL 2.28.9."""
    ll, ll128, simple = machines.DGX.rings
    assert (ll.hop_in_node, ll.hop_beside_network) == pytest.approx((0.6e-6, 1e-6))
    assert ll.most == pytest.approx((141e9, 39e9, 20.4e9))
    assert ll128.most == pytest.approx((12 * 36.7e9, 8 * 36.7e9, 8 * 36.7e9))
    assert simple.base_latency == pytest.approx(8.4e-6)
    assert (ll.hop_between_nodes, ll.hop_of_lone_ranks) == pytest.approx((2.7e-6, 5e-6))
    assert (ll.channel_bytes, ll.channel_bytes_by_ranks) == (0, 4096)
    assert (ll128.channel_bytes, simple.channel_bytes) == (5120, 32768)
    tree = machines.DGX.trees[2]
    assert tree.most == pytest.approx((12 * 38.7e9, 8 * 41.4e9, 8 * 36e9))


def test_ll128_is_for_nvlink_alone():
    assert [ring.base_latency for ring in machines.PCIE.rings] == pytest.approx(
        [6.6e-6, 8.4e-6]
    )
    assert len(machines.PCIE.trees) == 2


def test_flat_has_the_order_of_the_reader():
    """csrc/phantom/time/figures.cpp; tests/cpp/phantom/time/figures_test.cpp counts the
    same places."""
    accelerator = machines.Accelerator(
        "counted",
        *range(1, 12),
        multiprocessors=13,
        resident_blocks=14,
        block_seconds=12,
    )
    ring = machines.Protocol(
        *(24, 25, 26, 27, 29, 30, (31, 32, 33)),
        channel_bytes=34,
        channel_bytes_by_ranks=35,
        hop_of_lone_ranks=28,
    )
    network = machines.Network(
        *(15, 16, 18, (ring,), ()),
        channel_bandwidth=17,
        channels_in_node=19,
        channels_between_nodes=20,
        channels_of_pair_in_node=21,
        channels_of_pair_between_nodes=22,
    )
    host = machines.Host(37, 38, 39, 40, 41)
    expected = [*range(1, 23), 1, *range(24, 36), 0, *range(37, 42)]
    assert machines.flat(accelerator, network, host) == expected
