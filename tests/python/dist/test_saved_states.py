"""What programs have besides sharded parameters and AdamW is saved and found again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import lowtide
from lowtide.saving import CheckpointError
from support.bits import assert_same_tensors
from support.saving import SMALL, backward, full, make, shards, train

# -- optimizers ------------------------------------------------------------------------


def optimizers_of(model: Any, kind: str) -> Any:
    parameters = list(model.parameters())
    if kind == "local":
        return torch.optim.AdamW(lowtide.local_parameters(model), lr=1e-2)
    if kind == "momentum":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    if kind == "no_state":
        return torch.optim.SGD(parameters, lr=1e-2)
    if kind == "tensor_lr":
        return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False)
    if kind == "factored":
        return torch.optim.Adafactor(parameters, lr=1e-2)
    if kind == "two":
        return [
            torch.optim.AdamW(parameters[:5], lr=1e-2),
            torch.optim.SGD(parameters[5:], lr=1e-2, momentum=0.5),
        ]
    assert kind == "groups"
    decays, others = parameters[:5], parameters[5:]
    groups = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


KINDS = ("local", "momentum", "no_state", "tensor_lr", "two", "groups")


def step_all(model: Any, optimizers: list[Any], steps: range) -> None:
    for step in steps:
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:  # as a schedule does
                group["lr"] *= 0.5


def run_optimizers(path: Path, kind: str, resumes: bool) -> Any:
    model, _ = make(int(resumes))
    optimizers = optimizers_of(model, kind)
    all_of_them = optimizers if isinstance(optimizers, list) else [optimizers]
    if resumes:
        lowtide.load(path, model, optimizers)
    else:
        step_all(model, all_of_them, range(2))
        lowtide.save(path, model, optimizers)
    step_all(model, all_of_them, range(2, 4))
    state = [shards(model, one) for one in all_of_them]
    return state, [float(g["lr"]) for one in all_of_them for g in one.param_groups]


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_go_on(pool_of, tmp_path, kind):
    pool = pool_of(2)
    before = pool.run(run_optimizers, tmp_path / "it", kind, False)
    after = pool.run(run_optimizers, tmp_path / "it", kind, True)
    for (states, rates), (others, other_rates) in zip(after, before, strict=True):
        assert rates == other_rates
        for state, other in zip(states, others, strict=True):
            assert_same_tensors(state, other, kind)


def load_local(path: Path) -> Any:
    """An optimizer of plain rows loads what one of sharded parameters saved."""
    model, _ = make(1)
    optimizer = torch.optim.AdamW(lowtide.local_parameters(model), lr=1e-2)
    lowtide.load(path, model, optimizer)
    with lowtide.sharded_optimizer(optimizer):
        return full(model, optimizer)


def test_sharded_and_local_parameters_exchange_checkpoints(pool_of, tmp_path):
    from support.saving import save_after

    saved = pool_of(2).run(save_after, tmp_path / "it", 2)
    for state in pool_of(3).run(load_local, tmp_path / "it"):
        assert_same_tensors(state, saved[0], "local parameters")


def refuse_foreign_optimizers(path: Path) -> list[str]:
    class Own(torch.optim.SGD):
        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("never called")

    model, optimizer = make()
    lowtide.save(path, model, torch.optim.SGD(model.parameters()))
    texts = []
    with pytest.raises(CheckpointError) as raised:
        lowtide.load(path, model, Own(model.parameters()))
    texts.append(str(raised.value))
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    with pytest.raises(CheckpointError) as raised:
        lowtide.save(path, model, stranger)
    texts.append(str(raised.value))
    lowtide.save(path, model)
    with pytest.raises(CheckpointError) as raised:
        lowtide.load(path, model, optimizer)
    texts.append(str(raised.value))
    return texts


def test_optimizers_that_are_none_of_these_are_refused(pool_of, tmp_path):
    for texts in pool_of(2).run(refuse_foreign_optimizers, tmp_path / "it"):
        assert "Own: expected an optimizer whose state is torch.optim.Opt" in texts[0]
        assert "SGD: expected the model's parameters, got another one of" in texts[1]
        assert "expected an optimizer's state, got a checkpoint without" in texts[2]


# -- models ----------------------------------------------------------------------------


class Eccentric(nn.Module):
    """Buffers that forward writes, state of its own, a weight in two places, one that
    is frozen and one that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.outer = nn.Linear(6, 6, bias=False)
        self.outer.weight = self.inner.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.outer(self.norm(self.inner(x))) + self.scale * self.frozen(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def run_eccentric(path: Path, resumes: bool) -> Any:
    torch.manual_seed(int(resumes))
    model = Eccentric()
    lowtide.fully_shard(model.frozen)
    lowtide.fully_shard(model, ignored_params={model.scale})
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )

    def steps(numbers: range) -> None:
        for number in numbers:
            x = torch.full((4, 6), float(number)) + torch.eye(4, 6)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if resumes:
        assert lowtide.load(path, model, optimizer) == {}
        assert model.calls == 2
    else:
        steps(range(2))
        lowtide.save(path, model, optimizer)
    steps(range(2, 4))
    return shards(model, optimizer), model.calls


def test_a_model_with_all_sorts_of_state_goes_on(pool_of, tmp_path):
    pool = pool_of(2)
    before = pool.run(run_eccentric, tmp_path / "it", False)
    after = pool.run(run_eccentric, tmp_path / "it", True)
    for (state, calls), (other, others) in zip(after, before, strict=True):
        assert_same_tensors(state, other, "state")
        assert calls == others == 4


def run_activations(path: Path, policy: str, resumes: bool) -> Any:
    from support.model import ModelConfig, build
    from support.training import units

    config = ModelConfig(dim=16, num_heads=2, kv_dim=2, ffn=10, dropout=0.1)
    model = build(config, int(resumes))
    policies = {
        "remat": lowtide.ActivationPolicy(),
        "offload": lowtide.ActivationPolicy(offload=["input"]),
    }
    for i, layer in enumerate(model.layers):
        model.layers[i] = lowtide.checkpoint(layer, policies[policy])
    for unit in units(model, "blocks"):
        lowtide.fully_shard(unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if resumes:
        lowtide.load(path, model, optimizer)
    else:
        torch.manual_seed(dist.get_rank())
        train(model, optimizer, range(1), config)
        model.set_requires_gradient_sync(False)
        backward(model, 1, config)
        lowtide.save(path, model, optimizer)
    model.set_requires_gradient_sync(True)
    backward(model, 2, config)
    state = shards(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return state, train(model, optimizer, range(3, 5), config)


@pytest.mark.parametrize("policy", ["remat", "offload"])
def test_recomputed_and_offloaded_activations_go_on(pool_of, tmp_path, policy):
    pool = pool_of(2)
    before = pool.run(run_activations, tmp_path / "it", policy, False)
    after = pool.run(run_activations, tmp_path / "it", policy, True)
    for (state, losses), (other, other_losses) in zip(after, before, strict=True):
        assert losses == other_losses
        assert_same_tensors(state, other, policy)


def accumulate_rows(path: Path, resumes: bool) -> Any:
    """An embedding whose gradient comes in blocks of rows, as only large ones do."""
    from lowtide._sharding import embedding

    large, embedding.LARGE_TABLE = embedding.LARGE_TABLE, 1
    try:
        return accumulate(path, resumes)
    finally:
        embedding.LARGE_TABLE = large


def accumulate(path: Path, resumes: bool) -> Any:
    torch.manual_seed(int(resumes))
    model = nn.Sequential(nn.Embedding(700, 16), nn.Linear(16, 4))
    for layer in model:
        lowtide.fully_shard(layer)
    lowtide.fully_shard(model)

    def step(number: int, sync: bool) -> None:
        model.set_requires_gradient_sync(sync)
        tokens = torch.arange(40) * (number + 1) % 37 + dist.get_rank()
        model(tokens).square().sum().backward()

    if resumes:
        lowtide.load(path, model)
    else:
        step(0, False)
        step(1, False)
        lowtide.save(path, model)
    assert model[0]._get_fsdp_state().embedding_rows is not None
    step(2, False)
    step(3, True)
    return {n: p.grad.to_local().clone() for n, p in model.named_parameters()}


def test_rows_between_reductions_go_on(pool_of, tmp_path):
    pool = pool_of(2)
    before = pool.run(accumulate_rows, tmp_path / "it", False)
    after = pool.run(accumulate_rows, tmp_path / "it", True)
    for mine, other in zip(after, before, strict=True):
        assert_same_tensors(mine, other, "gradients")


def load_on_meta(path: Path) -> Any:
    from support.model import build

    model, optimizer = make()
    lowtide.save(path, model, optimizer)
    with torch.device("meta"):
        empty = build(SMALL)
    lowtide.fully_shard(empty)
    with pytest.raises(CheckpointError, match="Call model.to_empty"):
        lowtide.load(path, empty)
    empty.to_empty(device="cpu")
    lowtide.load(path, empty)
    return full(model, optimizer), full(empty, optimizer)


def test_a_model_without_storage_gets_it_first(pool_of, tmp_path):
    for saved, loaded in pool_of(2).run(load_on_meta, tmp_path / "it"):
        assert_same_tensors(loaded, saved, "parameters")


# -- who else saves and loads ----------------------------------------------------------


def save_flattened(path: Path) -> Any:
    """As torchtitan does: the model at the top, the optimizer flattened."""
    model, optimizer = make(system="fsdp2")
    train(model, optimizer, range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    content = dict(get_model_state_dict(model))
    content["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
    content["train_state"] = {"step": torch.tensor(2)}
    dcp.save(content, checkpoint_id=path)
    return full(model, optimizer)


def load_flattened(path: Path) -> Any:
    model, optimizer = make(1)
    with pytest.warns(UserWarning, match="nothing vouches"):
        lowtide.load(path, model, optimizer)
    return full(model, optimizer)


def test_flattened_optimizer_states_load(pool_of, tmp_path):
    saved = pool_of(2).run(save_flattened, tmp_path / "it")
    for state in pool_of(2).run(load_flattened, tmp_path / "it"):
        assert_same_tensors(state, saved[0], "flattened")


LONE = """
import sys, torch, lowtide, warnings
warnings.simplefilter("error")
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3)).sum().backward()
optimizer.step()
saving = lowtide.save(sys.argv[1], model, optimizer, {"it": [1, (2, "3")]},
                      in_background=True)
saving.wait()
weight = model.weight.detach().clone()
optimizer.step()
extra = lowtide.load(sys.argv[1], model, optimizer)
assert extra == {"it": [1, (2, "3")]}, extra
assert torch.equal(model.weight, weight)
assert optimizer.state[model.weight]["step"] == 1
assert model.weight.grad is not None
print("done")
"""


def test_a_process_alone_needs_no_group(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LONE, str(tmp_path / "it")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "done\n", done.stderr


def save_in_groups(path: Path) -> list[Any]:
    """As stages of a pipeline do, each its own module."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = dist.get_rank() // 2
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]

    def make_stage(seed: int) -> Any:
        torch.manual_seed(seed + stage)
        model = nn.Sequential(nn.Linear(4, 4 + stage))
        model = nn.ModuleDict({f"stage{stage}": model})
        lowtide.fully_shard(model[f"stage{stage}"], mesh=mesh)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make_stage(0)
    with pytest.raises(CheckpointError, match="they train different modules"):
        lowtide.save(path, model, optimizer)
    mine = path / f"stage{stage}"
    lowtide.save(mine, model, optimizer, process_group=groups[stage])
    other, others = make_stage(10)
    lowtide.load(mine, other, others, process_group=groups[stage])
    return [full(model, optimizer), full(other, others)]


def test_stages_save_to_paths_of_their_own(pool_of, tmp_path):
    for saved, loaded in pool_of(4).run(save_in_groups, tmp_path):
        assert_same_tensors(loaded, saved, "stage")
