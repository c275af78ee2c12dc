"""The programs of gpu_check whose figures are times, in tiny sizes over the dry
driver, where everything between two events takes a millisecond."""

from __future__ import annotations

from typing import Any

import pytest
from scale import TINY

from support.gpu_check import check_dry

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    steps = ("speed-plain", "speed-chunked", "links", "kernels", "host", "optimizer")
    return check_dry(tmp_path_factory.mktemp("dry"), *steps)[0]


def test_steps_of_both_systems_take_turns(seen: dict[str, Any]) -> None:
    for name in ("speed-plain", "speed-chunked"):
        speed = seen[name]
        assert speed["ms"] == {"fsdp2": [1.0, 1.0], "lowtide": [1.0, 1.0]}
        one = {"median": 1.0, "low": 1.0, "high": 1.0, "share": "all"}
        assert speed["ratio"] == one
        assert speed["flops"] > 0


def test_links_move_the_bytes_asked_for(seen: dict[str, Any]) -> None:
    each = 4096 / 1e6  # GB/s
    assert seen["links"] == {"h2d": each, "d2h": each, "both": 2 * each}


def test_kernels_count_what_they_read_and_write(seen: dict[str, Any]) -> None:
    rates = {k: round(v * 1e6) for k, v in seen["kernels"].items()}
    copied = rates["copy"] // 2  # bytes of the list in fp32
    assert rates["copy and cast, bf16 to fp32"] == copied * 3 // 2
    assert rates["copy and cast, fp32 to bf16"] == copied * 3 // 2
    assert rates["add, bf16 to fp32"] == copied * 5 // 2
    assert rates["add, fp32"] == copied * 3
    assert rates["norm"] == copied
    assert rates["scale"] == copied * 2
    assert 0 < rates["rows, bf16 to fp32"] < copied


def test_host_time_has_every_system_and_phase(seen: dict[str, Any]) -> None:
    host = seen["host"]
    assert set(host) == {"plain", "fsdp2", "lowtide"}
    for system in host.values():
        assert set(system["phases"]) == {"forward", "backward"}
        assert min(system["phases"].values()) > 0


def test_host_time_of_the_group_is_told_apart(seen: dict[str, Any]) -> None:
    host = seen["host"]
    assert host["plain"]["calls"] == {}
    units = TINY.host_layers + 1
    gathers = (2 * units - 1) / units  # the root's parameters stay
    theirs = {"allgather_base": gathers, "reduce_scatter_base": 1.0}
    assert host["fsdp2"]["calls"] == theirs
    assert sum(host["lowtide"]["calls"].values()) == gathers + 1
    for system in ("fsdp2", "lowtide"):
        assert host[system]["group"] > 0


def test_an_optimizers_step_is_of_five_kinds_of_parameters(
    seen: dict[str, Any],
) -> None:
    kinds = {"plain", "units", "fsdp2", "lowtide", "local_parameters"}
    for variant in seen["optimizer"].values():
        assert set(variant) == kinds
        assert min(kind["us"] for kind in variant.values()) > 0
