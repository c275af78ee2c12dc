"""lowtide's collectives on real process groups."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lowtide
from lowtide import _C
from lowtide._base import process_groups
from lowtide._sharding import groups
from lowtide._torch_version import VERSION
from support.bits import same_bits
from support.left_fold import left_fold
from support.rank_worker import destroy_group
from support.ranks import RankPool
from support.training import Run, Trace, train_sharded

COLUMNS = (128, 384, 128 * 77)
WAIT_SECONDS = 10


def collectives(group: dist.ProcessGroup | None = None) -> _C.Collectives:
    group = group or dist.group.WORLD
    assert group is not None
    return _C.Collectives(group.group_name, torch.device("cpu"))


def piece_of(rank: int, index: int, size: int) -> torch.Tensor:
    return torch.full((size,), 16 * rank + index, dtype=torch.uint8)


def gather_unit() -> tuple[bool, dict[str, tuple[int, int]], str]:
    ours = collectives()
    sizes = (1, 0, 300, 7)
    ins = [piece_of(ours.rank, i, size) for i, size in enumerate(sizes)]
    outs = [torch.zeros(ours.size * size, dtype=torch.uint8) for size in sizes]
    ours.all_gather(outs, ins, label="unit").wait()
    right = all(
        torch.equal(out, torch.cat([piece_of(r, i, size) for r in range(ours.size)]))
        for i, (out, size) in enumerate(zip(outs, sizes, strict=True))
    )
    return right, ours.counters, ours.backend


def test_a_gather_of_many_pieces_is_one_call(pool_of, world_size):
    for right, counters, backend in pool_of(world_size).run(gather_unit):
        assert right
        assert backend == "gloo"
        assert counters == {
            "all-gather": (1, (world_size - 1) * 308),
            "reduce-scatter": (0, 0),
            "all-reduce": (0, 0),
            "broadcast": (0, 0),
            "all-to-all": (0, 0),
        }


def reduce_in_every_form(dtype: torch.dtype) -> list[tuple[str, int, bool]]:
    """(form, columns, same bits as the left fold and the input unchanged)"""
    ours = collectives()
    rank, world_size = ours.rank, ours.size
    inputs, expected = [], []
    for columns in COLUMNS:
        generator = torch.Generator().manual_seed(columns)
        shape = (world_size, world_size, columns)
        spread = torch.randn(shape, generator=generator).mul(3).exp()
        by_rank = (torch.randn(shape, generator=generator) * spread).to(dtype)
        inputs.append(by_rank[rank].flatten())
        expected.append(left_fold(by_rank[:, rank].unbind(), rank))
    unchanged = [full.clone() for full in inputs]
    rows = []
    for average in (False, True):
        want = [total / world_size if average else total for total in expected]
        plain = [torch.empty_like(total) for total in expected]
        for out, full in zip(plain, inputs, strict=True):
            ours.reduce_scatter(out, full, average=average, label="unit").wait()
        listed = [torch.empty_like(total) for total in expected]
        ours.reduce_scatter_coalesced(
            listed, inputs, average=average, label="unit"
        ).wait()
        for form, outs in (("plain", plain), ("coalesced", listed)):
            for i, columns in enumerate(COLUMNS):
                equal = same_bits(outs[i], want[i])
                kept = same_bits(inputs[i], unchanged[i])
                rows.append((f"{form} average={average}", columns, equal and kept))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reductions_are_the_left_fold_and_a_division(pool_of, world_size, dtype):
    for rows in pool_of(world_size).run(reduce_in_every_form, dtype):
        assert [row for row in rows if not row[2]] == []
        assert len(rows) == 4 * len(COLUMNS)


def waited_in_reverse() -> bool:
    ours = collectives()
    pending, outs = [], []
    for i in range(8):
        outs.append(torch.zeros(64 * ours.size, dtype=torch.uint8))
        piece = piece_of(ours.rank, i, 64)
        pending.append(ours.all_gather([outs[i]], [piece], label=f"unit {i}"))
    for one in reversed(pending):
        one.wait()
        one.wait()
    return all(
        torch.equal(out, torch.cat([piece_of(r, i, 64) for r in range(ours.size)]))
        for i, out in enumerate(outs)
    )


def test_many_may_be_on_their_way(pool_of):
    assert pool_of(3).run(waited_in_reverse) == [True] * 3


def reduce_with_a_dead_peer() -> str:
    ours = collectives()
    dist.barrier()
    if ours.rank == 1:
        os._exit(3)
    try:
        ours.reduce_scatter(
            torch.empty(128), torch.ones(3 * 128), average=True, label="layers.7"
        ).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_dead_peer_is_an_error_that_names_the_unit():
    with RankPool(3, group_timeout=WAIT_SECONDS) as pool:
        outcomes = pool.outcomes(reduce_with_a_dead_peer)
    assert outcomes[1].kind == "died"
    texts = {rank: outcomes[rank].value for rank in (0, 2)}
    # The peer's address; who had sent it all before waits for the other one, in vain.
    assert any("[127.0.0.1]:" in text for text in texts.values())
    for rank, text in texts.items():
        assert text.startswith(
            "lowtide: layers.7: expected the reduce-scatter to finish on all ranks, "
            "got '"
        )
        assert "[127.0.0.1]:" in text or "Timed out waiting" in text
        assert text.endswith(
            f"(rank {rank} of 3). Look at the log of the rank that failed first; "
            "then call lowtide.abort_step() or restart from the last checkpoint."
        )


def reduce_with_an_absent_peer() -> str:
    """Over a group that torch watches, as TORCH_DISTRIBUTED_DEBUG=DETAIL makes all."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    dist.set_debug_level(before)
    ours = collectives(group)
    if ours.rank == 1:
        return ""
    with pytest.raises(RuntimeError) as error:
        ours.reduce_scatter(
            torch.empty(128), torch.ones(3 * 128), average=True, label="layers.7"
        ).wait()
    return str(error.value)


def test_a_failed_peers_rank_is_named_where_the_group_knows_it():
    """Of its own, gloo knows an address."""
    with RankPool(3, group_timeout=WAIT_SECONDS) as pool:
        texts = pool.run(reduce_with_an_absent_peer)
    assert texts[0].startswith(
        "lowtide: layers.7: expected the reduce-scatter to finish on all ranks, got "
        "'[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1000 ms' (rank 0 of 3). "
    )
    assert "waiting for send/recv from rank 0" in texts[2]  # who knows more


def on_a_fake_group() -> tuple[str, int, list[int], list[float]]:
    group = dist.new_group([0], backend="fake")
    ours = collectives(group)
    gathered = torch.zeros(3, dtype=torch.uint8)
    ours.all_gather([gathered], [piece_of(2, 0, 3)], label="unit").wait()
    out = torch.full((2,), 5.0)
    ours.reduce_scatter(out, torch.ones(2), average=True, label="unit").wait()
    return ours.backend, ours.size, gathered.tolist(), out.tolist()


def test_a_fake_group_gathers_copies_and_leaves_reductions_alone(pool_of):
    left = 5.0 if VERSION < (2, 13) else 1.0  # torch 2.13 copies what one rank has
    assert pool_of(1).run(on_a_fake_group) == [("fake", 1, [32] * 3, [left] * 2)]


def on_a_device_without_a_backend() -> str:
    group = dist.new_group(backend="cpu:gloo")
    with pytest.raises(ValueError, match="lowtide: process group") as error:
        _C.Collectives(group.group_name, torch.device("cuda"))
    return str(error.value)


def test_a_group_without_a_backend_for_the_device_is_refused(pool_of):
    for rank, text in enumerate(pool_of(2).run(on_a_device_without_a_backend)):
        assert text == (
            "lowtide: process group: expected a backend for cuda tensors, got one for "
            f"cpu (rank {rank} of 2). Pass init_process_group or init_device_mesh a "
            "backend for cuda, or move the model."
        )


def threads_of_gloo() -> int:
    tasks = Path("/proc/self/task").iterdir()
    return sum((task / "comm").read_text().startswith("pt_gloo") for task in tasks)


def destroy_all_but_the_model(folder: Path) -> tuple[int, int, int, str]:
    before = set(distributed_c10d._world.pg_map)
    first = threads_of_gloo()
    groups._channels.clear()  # one over the same ranks would be taken
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = nn.Linear(4, 4)
    lowtide.fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    lowtide.save(folder / "saved", model, process_group=mesh.get_group())
    of_axes = dist.new_group()
    with lowtide.sequence_parallel.gather_policy(regather="all", min_bytes=0):
        x = torch.ones(2, 4, requires_grad=True)
        gather = lowtide.sequence_parallel.sp_all_gather
        gather(x, of_axes, name="tokens").sum().backward()
    lowtide.spmd.axes.resolve(of_axes).collectives(torch.device("cpu"))
    most = threads_of_gloo()
    for group in set(distributed_c10d._world.pg_map) - before:
        destroy_group(group)
    del mesh, group, of_axes
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 4))
    return first, most, threads_of_gloo(), str(error.value)


def test_groups_end_with_destroy_process_group(pool_of, tmp_path):
    """However long the model lives: their threads end, which otherwise could end the
    process when the interpreter does."""
    for rank, (first, most, last, text) in enumerate(
        pool_of(2).run(destroy_all_but_the_model, tmp_path)
    ):
        # The mesh's own, of two threads, is kept by torch's DeviceMesh.
        assert (most, last) == (first + 10, first + 2)
        assert text == (
            "lowtide: process group: expected the one that the model was sharded over, "
            f"got none: it was destroyed (rank {rank} of 2). Call "
            "destroy_process_group after the last step, or shard a new model over a "
            "new group."
        )


def test_no_group_of_lowtide_outlives_its_program():
    """Where all are destroyed at once. Of the world's two threads torch's default
    arguments (torch.distributed.nn.functional) keep hold."""
    script = Path(__file__).parent / "scripts" / "threads_at_exit.py"
    printed = subprocess.check_output(
        [sys.executable, "-m", "torch.distributed.run"]
        + ["--standalone", "--nproc-per-node=2", str(script)],
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert {*printed.split()} <= {"0", "2"}
    assert len(printed.split()) == 2


# -- names ----------------------------------------------------------------------------


def train_and_save(folder: Path, *, alone: dict[int, int]) -> dict[str, torch.Tensor]:
    """Of a model whose parameters stay within pairs of ranks after forward: all a run
    makes groups for. Each rank makes as many for itself alone as ``alone`` says."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for _ in range(alone.get(rank, 0)):
        dist.new_group([rank], use_local_synchronization=True)
    over_all = lowtide.fully_shard(nn.Linear(8, 8), reshard_after_forward=2)
    over_both = lowtide.fully_shard(nn.Linear(8, 8), mesh=mesh)
    model: Any = nn.Sequential(over_all, over_both)
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    lowtide.save(folder, model)
    saved = {name: p.full_tensor() for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    lowtide.load(folder, model)
    for name, parameter in model.named_parameters():
        assert same_bits(parameter.full_tensor(), saved[name])
    return saved


def test_ranks_may_have_made_groups_of_their_own(tmp_path):
    """torch names a group by how many a rank has made."""
    with RankPool(4, group_timeout=WAIT_SECONDS) as pool:
        expected = pool.run(train_and_save, tmp_path / "none", alone={})
    with RankPool(4, group_timeout=WAIT_SECONDS) as pool:
        seen = pool.run(train_and_save, tmp_path / "some", alone={1: 1, 2: 2})
    for ours, theirs in zip(seen, expected, strict=True):
        for name, value in theirs.items():
            assert same_bits(ours[name], value)


def count_of_groups() -> tuple[int, int]:
    lowtide.fully_shard(nn.Linear(4, 4))
    before = distributed_c10d._world.group_count
    process_groups.new_group([dist.get_rank()], "lowtide_of_a_test", backend="gloo")
    return before, distributed_c10d._world.group_count


def test_a_group_of_ours_moves_no_name_of_the_programs(pool_of):
    for before, after in pool_of(2).run(count_of_groups):
        assert before == after


# -- one communicator -----------------------------------------------------------------

SHARED_RUN = Run(world_size=2, microbatches=2, num_steps=2)


def train_and_count(run: Run) -> tuple[Trace, bool]:
    """The run, and whether gathers and reductions had the same group."""
    trace = train_sharded("lowtide", run)
    known = [*groups._known.values()]
    one = all(g.gather.process_group is g.reduce.process_group for g in known)
    return trace, one and bool(known)


def test_one_communicator_for_both_gives_the_same_bits(pool_of):
    separate = pool_of(2).run(train_and_count, SHARED_RUN)
    with RankPool(2, env={"LOWTIDE_COMMUNICATORS": "shared"}) as pool:
        shared = pool.run(train_and_count, SHARED_RUN)
    for (apart, one_apart), (together, one_together) in zip(
        separate, shared, strict=True
    ):
        assert (one_apart, one_together) == (False, True)
        assert apart.losses == together.losses
        for a, b in zip(apart.params, together.params, strict=True):
            assert all(same_bits(a[name], b[name]) for name in a)


def compare_without_network() -> str:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu")
    groups._channels.clear()  # one over the same ranks would be taken
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_COMMUNICATORS", "shared")
        patch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
        with pytest.raises(RuntimeError) as caught:
            groups.groups_of(mesh, torch.device("cpu"))
        patch.setenv("LOWTIDE_COMPARE_RANKS", "off")
        assert groups.groups_of(mesh, torch.device("cpu")).host is None
    return str(caught.value)


def test_a_network_that_gloo_can_not_use_is_named(pool_of):
    for text in pool_of(2).run(compare_without_network):
        assert text.startswith(
            "lowtide: comparing what ranks did: expected gloo to connect the ranks of "
            "the mesh, got '"
        )
        assert text.endswith(
            "Set GLOO_SOCKET_IFNAME to an interface that reaches all machines, or "
            "LOWTIDE_COMPARE_RANKS=off."
        )
