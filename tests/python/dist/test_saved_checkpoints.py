"""``lowtide.save`` and ``lowtide.load``: what was saved is what goes on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lowtide
from lowtide.saving import CheckpointError
from support.bits import assert_same_tensors
from support.saving import DROPPING, backward, full, make, save_after, shards, train

# -- a resume is bit-equal ------------------------------------------------------------


def save_and_go_on(path: Path, background: bool) -> tuple[Any, Any]:
    model, optimizer = make(config=DROPPING)
    torch.manual_seed(dist.get_rank())
    train(model, optimizer, range(2), DROPPING)
    saving = lowtide.save(path, model, optimizer, {"step": 2}, in_background=background)
    assert (saving is not None) == background
    losses = train(model, optimizer, range(2, 4), DROPPING)
    if saving is not None:
        saving.wait()
        assert saving.done()
    return losses, shards(model, optimizer)


def resume(path: Path) -> tuple[Any, Any]:
    model, optimizer = make(1, config=DROPPING)
    extra = lowtide.load(path, model, optimizer)
    assert extra == {"step": 2}
    losses = train(model, optimizer, range(extra["step"], 4), DROPPING)
    return losses, shards(model, optimizer)


@pytest.mark.parametrize("background", [False, True], ids=("waiting", "background"))
def test_a_resume_is_bit_equal(pool_of, tmp_path, world_size, background):
    pool = pool_of(world_size)
    path = tmp_path / "step-2"
    before = pool.run(save_and_go_on, path, background)
    after = pool.run(resume, path)
    for rank in range(world_size):
        assert after[rank][0] == before[rank][0]
        assert_same_tensors(after[rank][1], before[rank][1], f"rank {rank}")


# -- other ranks, other meshes --------------------------------------------------------


def load_whole(path: Path, **settings: Any) -> Any:
    model, optimizer = make(1, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowtide.load(path, model, optimizer)
    said = [str(w.message) for w in caught if "generators stay" in str(w.message)]
    return full(model, optimizer), said


@pytest.mark.parametrize("sizes", [(4, 1), (4, 2), (4, 3), (2, 4)])
def test_other_numbers_of_ranks_load_it(pool_of, tmp_path, sizes):
    saved = pool_of(sizes[0]).run(save_after, tmp_path / "it", 2)
    loaded = pool_of(sizes[1]).run(load_whole, tmp_path / "it")
    for state, said in loaded:
        assert_same_tensors(state, saved[0], f"{sizes[0]} ranks to {sizes[1]}")
        assert len(said) == 1, "generators are of as many ranks"


@pytest.mark.parametrize("meshes", [("shards", "replicas"), ("replicas", "shards")])
def test_other_meshes_load_it(pool_of, tmp_path, meshes):
    pool = pool_of(4)
    saved = pool.run(save_after, tmp_path / "it", 2, mesh=meshes[0])
    loaded = pool.run(load_whole, tmp_path / "it", mesh=meshes[1])
    for state, said in loaded:
        assert_same_tensors(state, saved[0], " to ".join(meshes))
        assert not said
    files = sorted(path.name for path in (tmp_path / "it").glob("*.distcp"))
    assert len(files) == 4, "replicas share the work"


def parallel(seed: int, shape: tuple[int, int]) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 8))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for layer in model:
        lowtide.fully_shard(layer, mesh=mesh["dp"])
    lowtide.fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def save_parallel(path: Path, shape: tuple[int, int]) -> Any:
    model, optimizer = parallel(0, shape)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    lowtide.save(path, model, optimizer)
    return full(model, optimizer)


def load_parallel(path: Path, shape: tuple[int, int]) -> Any:
    model, optimizer = parallel(1, shape)
    lowtide.load(path, model, optimizer)
    return full(model, optimizer)


@pytest.mark.parametrize(
    "shapes", [((2, 2), (1, 2)), ((2, 2), (4, 1)), ((1, 2), (2, 2))]
)
def test_tensor_parallel_meshes_load_it(pool_of, tmp_path, shapes):
    first, second = (pool_of(a * b) for a, b in shapes)
    saved = first.run(save_parallel, tmp_path / "it", shapes[0])
    for state in second.run(load_parallel, tmp_path / "it", shapes[1]):
        assert_same_tensors(state, saved[0], f"{shapes[0]} to {shapes[1]}")


# -- foreign checkpoints --------------------------------------------------------------


def save_stock(path: Path, name: str | None) -> Any:
    """As FSDP2's users do, at the top or inside of something of theirs."""
    model, optimizer = make(system="fsdp2")
    train(model, optimizer, range(2))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    content: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    content["progress"] = {"step": 2}
    dcp.save(content if name is None else {name: content}, checkpoint_id=path)
    return full(model, optimizer)


def load_stock(path: Path) -> Any:
    model, optimizer = make(1)
    with pytest.warns(UserWarning, match="nothing vouches for its bytes"):
        extra = lowtide.load(path, model, optimizer)
    return extra, full(model, optimizer)


@pytest.mark.parametrize("name", [None, "app"])
def test_a_checkpoint_of_fsdp2s_loads_with_a_warning(pool_of, tmp_path, name):
    saved = pool_of(2).run(save_stock, tmp_path / "it", name)
    for extra, state in pool_of(3).run(load_stock, tmp_path / "it"):
        progress = {"progress": {"step": 2}}
        assert extra == (progress if name is None else {name: progress})
        assert_same_tensors(state, saved[0], "saved by FSDP2")


def load_into_fsdp2(path: Path) -> Any:
    model, optimizer = make(1, system="fsdp2")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    content: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    content["extra"] = {"step": None}
    dcp.load(content, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    assert content["extra"] == {"step": 2}
    return full(model, optimizer)


def test_fsdp2_loads_it_by_torchs_own_reader(pool_of, tmp_path):
    saved = pool_of(2).run(save_after, tmp_path / "it", 2)
    for state in pool_of(3).run(load_into_fsdp2, tmp_path / "it"):
        assert_same_tensors(state, saved[0], "loaded by FSDP2")


def test_one_file_of_torchs_is_made_of_it(pool_of, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    saved = pool_of(2).run(save_after, tmp_path / "it", 2)
    dcp_to_torch_save(tmp_path / "it", tmp_path / "it.pt")
    whole = torch.load(tmp_path / "it.pt", weights_only=True)
    for name, value in whole["model"].items():
        assert torch.equal(value, saved[0][name]), name


# -- between two reductions -----------------------------------------------------------


def accumulate(model: Any, steps: range) -> None:
    for step in steps:
        backward(model, step, DROPPING)


WAYS = ("each", "without_sync", "without_all_reduce")


def postpone(model: Any, way: str, postponed: bool) -> None:
    if way == "without_sync":
        model.set_requires_gradient_sync(not postponed)
    elif way == "without_all_reduce":
        model.set_requires_all_reduce(not postponed)


def accumulating(seed: int, way: str, fused: bool) -> Any:
    mesh = "replicas" if way == "without_all_reduce" else "shards"
    settings = {"grads": "fused"} if fused else {}
    return make(seed, config=DROPPING, mesh=mesh, **settings)


def save_between(path: Path, way: str, fused: bool) -> Any:
    model, optimizer = accumulating(0, way, fused)
    train(model, optimizer, range(1), DROPPING)
    torch.manual_seed(dist.get_rank())
    postpone(model, way, True)
    accumulate(model, range(1, 3))
    lowtide.save(path, model, optimizer)
    return finish(model, optimizer, way)


def finish(model: Any, optimizer: Any, way: str) -> Any:
    postpone(model, way, True)
    accumulate(model, range(3, 4))
    postpone(model, way, False)
    accumulate(model, range(4, 5))
    state = shards(model, optimizer)  # with gradients
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(5, 6), DROPPING)
    return state, shards(model, optimizer)


def resume_between(path: Path, way: str, fused: bool, again: Path | None) -> Any:
    model, optimizer = accumulating(1, way, fused)
    train(model, optimizer, range(1), DROPPING)
    lowtide.load(path, model, optimizer)
    if again is not None:
        lowtide.save(again, model, optimizer)
    return finish(model, optimizer, way)


def resume_anew(path: Path, way: str, fused: bool) -> Any:
    model, optimizer = accumulating(1, way, fused)
    lowtide.load(path, model, optimizer)
    return finish(model, optimizer, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fused", [False, True], ids=("exact", "fused"))
def test_a_resume_between_reductions_is_bit_equal(pool_of, tmp_path, way, fused):
    pool = pool_of(4 if way == "without_all_reduce" else 2)
    paths = tmp_path / "first", tmp_path / "second"
    before = pool.run(save_between, paths[0], way, fused)
    runs = {
        "anew": pool.run(resume_anew, paths[0], way, fused),
        "in a model that ran": pool.run(resume_between, paths[0], way, fused, paths[1]),
        "saved again": pool.run(resume_anew, paths[1], way, fused),
    }
    for what, after in runs.items():
        for rank, (gradients, state) in enumerate(after):
            assert_same_tensors(gradients, before[rank][0], f"{what}, rank {rank}")
            assert_same_tensors(state, before[rank][1], f"{what}, rank {rank}")


def drop_what_came_back(path: Path) -> Any:
    model, optimizer = accumulating(1, "without_sync", False)
    lowtide.load(path, model, optimizer)
    optimizer.zero_grad()
    backward(model, 7, DROPPING)
    gradients = {n: p.grad.to_local().clone() for n, p in model.named_parameters()}
    optimizer.zero_grad()
    lowtide.load(path, model, optimizer)
    lowtide.abort_step(model)
    backward(model, 7, DROPPING)
    again = {n: p.grad.to_local().clone() for n, p in model.named_parameters()}
    return gradients, again


def test_zero_grad_drops_what_came_back(pool_of, tmp_path):
    pool = pool_of(2)
    pool.run(save_between, tmp_path / "it", "without_sync", False)
    for gradients, again in pool.run(drop_what_came_back, tmp_path / "it"):
        assert list(gradients) == list(again)
        assert_same_tensors(gradients, again, "only the backward behind it counts")


def load_elsewhere(path: Path, mesh: str) -> str:
    model, optimizer = make(1, config=DROPPING, mesh=mesh)
    before = shards(model, optimizer)
    with pytest.raises(CheckpointError) as raised:
        lowtide.load(path, model, optimizer)
    assert_same_tensors(shards(model, optimizer), before, "untouched")
    return str(raised.value)


def test_gradients_between_reductions_belong_to_their_ranks(pool_of, tmp_path):
    pool_of(4).run(save_between, tmp_path / "it", "without_sync", False)
    for text in pool_of(2).run(load_elsewhere, tmp_path / "it", "shards"):
        assert "expected the 4 ranks that saved gradients between two" in text
        assert "waiting" in text
    for text in pool_of(4).run(load_elsewhere, tmp_path / "it", "replicas"):
        assert "to come back to the mesh and placements (4,)" in text
