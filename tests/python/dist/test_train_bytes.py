"""examples/train_bytes.py and examples/demo.py as a user starts them."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instruments import Traffic
from support.commands import one_agent, run_together, torchrun

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS, COMPARED_STEPS = 10, 4
TRAINING = ["--config=tiny", f"--steps={STEPS}", "--precision=bf16", "--threads=1"]


def train_bytes(result: Path, *options: str) -> list[str]:
    program = str(EXAMPLES / "train_bytes.py")
    return [program, *TRAINING, f"--result={result}", *options]


def read(result: Path) -> dict[str, Any]:
    return json.loads(result.read_text())


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_demo_finds_all_systems_equal(tmp_path):
    """Lowtide, resumed from its checkpoint, FSDP2, unsharded: same losses, same
    parameters; the demo itself says so by its exit status."""
    options = [
        f"--out={tmp_path}",
        "--config=tiny",
        f"--steps={STEPS}",
        f"--compared-steps={COMPARED_STEPS}",
    ]
    program = [sys.executable, str(EXAMPLES / "demo.py"), *options]
    [output] = run_together([program], timeout=480)
    assert output.count("equal bit for bit") == 3
    assert "DIFFERENT" not in output

    whole, resumed = read(tmp_path / "lowtide.json"), read(tmp_path / "resumed.json")
    assert len(whole["losses"]) == STEPS
    assert resumed["first_step"] == STEPS // 2
    assert resumed["losses"] == whole["losses"][STEPS // 2 :]
    fsdp2, unsharded = read(tmp_path / "fsdp2.json"), read(tmp_path / "unsharded.json")
    assert len(fsdp2["losses"]) == COMPARED_STEPS
    assert fsdp2["losses"] == unsharded["losses"] == whole["losses"][:COMPARED_STEPS]
    assert fsdp2["validations"] == unsharded["validations"]
    assert fsdp2["traffic"]["sent_bytes"] > 0 == unsharded["traffic"]["sent_bytes"]
    picture = (tmp_path / "step_memory.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    if torch.version.cuda is not None:
        lowtide, fsdp2 = (
            read(tmp_path / f"plan_{system}.json")["peak_reserved"]
            for system in ("lowtide", "fsdp2")
        )
        assert lowtide < 0.85 * fsdp2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_machines_train_as_one_does(tmp_path):
    """Two agents of one process each meet by a c10d rendezvous."""
    together = tmp_path / "together.json"
    run_together([[*one_agent(2), *train_bytes(together)]], timeout=180)

    endpoint = f"127.0.0.1:{free_port()}"
    agent = torchrun(
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        "--rdzv-id=train-bytes",
        "--local-addr=127.0.0.1",
    )
    apart = [tmp_path / "machine0.json", tmp_path / "machine1.json"]
    outputs = run_together(
        [[*agent, *train_bytes(result)] for result in apart], timeout=180
    )
    # Rank 0 speaks and writes; it is on either machine.
    written = [result for result in apart if result.exists()]
    assert len(written) == 1
    assert sum(f"step {STEPS}, validation loss" in output for output in outputs) == 1
    ours, expected = read(written[0]), read(together)
    assert ours["num_ranks"] == 2
    assert [len(step) for step in ours["losses"]] == [2] * STEPS
    assert ours["losses"] == expected["losses"]
    assert ours["validations"] == expected["validations"]


@pytest.mark.timeout(200)
def test_activation_checkpointing_and_microbatches_run_under_plain_python(tmp_path):
    result = tmp_path / "alone.json"
    options = ["--activation-checkpointing", "--microbatches=2", "--batch=2"]
    command = [sys.executable, *train_bytes(result, *options)]
    run_together([command], timeout=180)
    alone = read(result)
    assert alone["num_ranks"] == 1
    assert len(alone["losses"]) == STEPS


def tcp_bytes_sent() -> int:
    """Payload that this process's TCP connections have sent, says the kernel."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(descriptor)))
        except OSError:  # no socket, or closed since
            continue
        with connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (
                socket.AF_INET,
                socket.AF_INET6,
            ):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total


def collectives(count: int) -> None:
    """One of each kind that a training step has, on `count` fp32 elements a rank."""
    group = dist.group.WORLD
    world_size = dist.get_world_size()
    shard, full = torch.ones(count), torch.ones(world_size * count)
    dist.all_gather_into_tensor(full, shard)
    group.allgather_into_tensor_coalesced([full, full], [shard, shard]).wait()
    dist.reduce_scatter_tensor(shard, full)
    dist.all_reduce(shard)


def counted_and_sent(count: int) -> tuple[dict[str, int], int, int]:
    collectives(count)  # connects
    dist.barrier()
    before = tcp_bytes_sent()
    traffic = Traffic()
    with traffic.counting():
        collectives(count)
    sent = tcp_bytes_sent() - before
    dist.barrier()
    return traffic.result["calls"], traffic.result["sent_bytes"], sent


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_counted_traffic_is_what_the_sockets_sent(pool_of, num_ranks):
    count = 3 << 16
    for calls, counted, sent in pool_of(num_ranks).run(counted_and_sent, count):
        # gloo has no reduce-scatter of its own.
        assert calls == {"all_gather": 2, "all_reduce": 2}
        shard, others = 4 * count, num_ranks - 1
        assert (
            counted
            == shard * others * 3 + 2 * shard * others * (num_ranks + 1) // num_ranks
        )
        assert counted <= sent < counted * 1.01
