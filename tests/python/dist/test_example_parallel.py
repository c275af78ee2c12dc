"""examples/llama_parallel.py: the Llama of examples/llama.py, on a dp x tp mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import llama
import llama_parallel
import lowtide
import parallel_checkpoint
from lowtide._gather.axes import axis_of

CONFIG = dataclasses.replace(llama.CONFIGS["tiny"], max_seq_len=8)
NAMES = ("attn_in", "ffn_in", "head_in")


def mesh_of(dp: int, tp: int) -> Any:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def whole_model() -> llama.Llama:
    model = llama.Llama(CONFIG)
    llama.init_weights(model, seed=1)
    return model


def batch(step: int, dp: int) -> torch.Tensor:
    generator = llama.generator(step, f"{dp}")
    shape = (2, CONFIG.max_seq_len + 1)
    return torch.randint(0, CONFIG.vocab_size, shape, generator=generator)


def step_of(
    model: Any, step: int, dp: int, regather: bool
) -> tuple[torch.Tensor, dict[str, int]]:
    tokens = batch(step, dp)
    names = ["attn_in", "ffn_in"] if regather else []
    with lowtide.sequence_parallel.gather_policy(regather=names, min_bytes=0):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    axis = axis_of(model.tp.get_group(), torch.device("cpu"))
    figures = axis.figures()
    axis.reset_figures()
    return loss.detach(), {name: figures[name]["regathers"] for name in NAMES}


def against_one_process() -> dict[str, Any]:
    """Loss and gradients of the first step, beside `Llama` on all batches."""
    mesh = mesh_of(2, 2)
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    whole = whole_model()
    model = llama_parallel.ParallelLlama(CONFIG, mesh["tp"])
    llama_parallel.load_whole(model, dict(whole.named_parameters()))
    llama_parallel.shard(model, mesh["dp"])
    loss, _ = step_of(model, 0, dp, regather=True)
    ours = {n: p.grad.full_tensor() for n, p in model.named_parameters()}

    losses = []
    for each in range(2):
        tokens = batch(0, each)
        logits = whole(tokens[:, :-1]).flatten(0, 1)
        losses.append(F.cross_entropy(logits, tokens[:, 1:].flatten()))
    (sum(losses) / 2).backward()
    close = [torch.allclose(loss, losses[dp], rtol=1e-5)]
    for name, parameter in whole.named_parameters():
        place, dim = llama_parallel.place_of(name)
        expected = parameter.grad
        if dim is not None:
            expected = expected.chunk(2, dim)[tp]
        close.append(torch.allclose(ours[place], expected, rtol=1e-3, atol=1e-6))
    return {"close": close, "num": len(ours)}


def test_loss_and_gradients_are_those_of_the_whole_model(pool_of):
    for seen in pool_of(4).run(against_one_process):
        assert all(seen["close"]), seen
        assert len(seen["close"]) == seen["num"] + 1


def trained(regather: bool, steps: int = 3) -> dict[str, Any]:
    mesh = mesh_of(2, 2)
    model = llama_parallel.ParallelLlama(CONFIG, mesh["tp"])
    llama_parallel.load_whole(model, dict(whole_model().named_parameters()))
    llama_parallel.shard(model, mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, counts = [], {}
    for step in range(steps):
        loss, counts = step_of(model, step, mesh["dp"].get_local_rank(), regather)
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    parameters = [p.to_local().detach().clone() for p in model.parameters()]
    return {"losses": losses, "parameters": parameters, "regathers": counts}


def test_gathering_again_changes_no_bit(pool_of):
    again = pool_of(4).run(trained, True)
    saved = pool_of(4).run(trained, False)
    for a, b in zip(again, saved, strict=True):
        assert a["regathers"] == {"attn_in": 2, "ffn_in": 2, "head_in": 0}
        assert set(b["regathers"].values()) == {0}
        for one, other in zip(
            a["losses"] + a["parameters"], b["losses"] + b["parameters"], strict=True
        ):
            assert torch.equal(one, other)


def model_on(dp: int, tp: int, seed: int) -> tuple[Any, Any, Any]:
    """A model with this seed's values, its optimizer, and their mesh."""
    mesh = mesh_of(dp, tp)
    whole = llama.Llama(CONFIG)
    llama.init_weights(whole, seed=seed)
    model = llama_parallel.ParallelLlama(CONFIG, mesh["tp"])
    llama_parallel.load_whole(model, dict(whole.named_parameters()))
    llama_parallel.shard(model, mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), mesh


def train_and_save(dp: int, tp: int, directory: Path) -> None:
    model, optimizer, mesh = model_on(dp, tp, seed=1)
    for step in range(2):
        step_of(model, step, mesh["dp"].get_local_rank(), regather=True)
        optimizer.step()
        optimizer.zero_grad()
    parallel_checkpoint.save(model, optimizer, mesh, directory)


def load_and_save(dp: int, tp: int, directory: Path, again: Path) -> None:
    model, optimizer, mesh = model_on(dp, tp, seed=2)
    parallel_checkpoint.load(model, optimizer, mesh, directory)
    parallel_checkpoint.save(model, optimizer, mesh, again)


def read_whole(directory: Path) -> dict[str, torch.Tensor]:
    """Parameters and moments, in this process alone, by the names of `Llama`."""
    content: dict[str, Any] = {"model": {}, "optimizer": {}}
    for name, p in llama.Llama(CONFIG).named_parameters():
        content["model"][name] = torch.full_like(p.detach(), torch.nan)
        content["optimizer"][name] = {
            "step": torch.tensor(-1.0),
            "exp_avg": torch.full_like(p.detach(), torch.nan),
            "exp_avg_sq": torch.full_like(p.detach(), torch.nan),
        }
    dcp.load(content, checkpoint_id=directory)
    flat = dict(content["model"])
    for name, values in content["optimizer"].items():
        flat |= {f"{name} {key}": value for key, value in values.items()}
    return flat


@pytest.mark.parametrize("shape", [(4, 1), (1, 2), (2, 1), (2, 2)], ids=str)
def test_a_checkpoint_loads_on_another_mesh(pool_of, tmp_path: Path, shape) -> None:
    """Parameters and moments, bit for bit, at another tp size and without any."""
    pool_of(4).run(train_and_save, 2, 2, tmp_path / "saved")
    dp, tp = shape
    pool_of(dp * tp).run(load_and_save, dp, tp, tmp_path / "saved", tmp_path / "again")
    saved, again = (read_whole(tmp_path / name) for name in ("saved", "again"))
    assert set(saved) == set(again) and len(saved) == 4 * 21
    for name, value in saved.items():
        assert torch.equal(value, again[name]), name
        assert not value.isnan().any(), name
    plain = llama.Llama(CONFIG)
    plain.load_state_dict({name: saved[name] for name in plain.state_dict()})


def example_losses() -> list[float]:
    return llama_parallel.train(CONFIG, mesh_of(2, 2), 12)


def test_the_example_learns(pool_of):
    for losses in pool_of(4).run(example_losses):
        assert losses[-1] < losses[0] - 0.3
