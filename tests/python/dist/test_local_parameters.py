"""An optimizer on plain local shards: the bits, and the state dicts, of one on
DTensors."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.optim.optimizer as optimizer_module
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from support.bits import assert_same_tensors, assert_same_traces
from support.model import TINY, build
from support.systems import get_system
from support.training import ADAMW, Run, Trace, adamw, local, shard, train_step

NUM_STEPS = 4
SAVED_AFTER = 2
VARIANTS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def make(kind: str, run: Run, variant: str, seed: int = 0) -> tuple[Any, Any]:
    """`kind`: fsdp2, lowtide (DTensors) or local."""
    torch.manual_seed(seed)
    system = get_system("fsdp2" if kind == "fsdp2" else "lowtide")
    model: Any = shard(build(run.model), run, system)
    if kind == "local":
        parameters = lowtide.local_parameters(model)
        return model, torch.optim.AdamW(parameters, **ADAMW, **VARIANTS[variant])
    return model, adamw(model, **VARIANTS[variant])


def train(kind: str, run: Run, variant: str) -> Trace:
    model, optimizer = make(kind, run, variant)
    trace = Trace()
    for step in range(NUM_STEPS):
        train_step(model, optimizer, run, step, trace)
        assert all(p.grad is None for p in model.parameters())
    return trace


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_has_the_bits_of_dtensors(pool_of, num_ranks, variant):
    run = Run(TINY, num_ranks, clip=0.5, microbatches=2)
    pool = pool_of(num_ranks)
    assert_same_traces(
        pool.run(train, "local", run, variant), pool.run(train, "fsdp2", run, variant)
    )


def state_of(model: nn.Module, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    moments = {
        f"{name} {key}": local(value).clone()
        for name, values in state["state"].items()
        for key, value in values.items()
    }
    return {n: local(p).clone() for n, p in model.named_parameters()} | moments


def save(kind: str, run: Run, path: Path) -> tuple[dict[str, torch.Tensor], Trace]:
    model, optimizer = make(kind, run, "loop")
    for step in range(SAVED_AFTER):
        train_step(model, optimizer, run, step, Trace())
    with lowtide.sharded_optimizer(optimizer):
        model_state, state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=path)
        saved = state_of(model, state)
    trace = Trace()
    for step in range(SAVED_AFTER, NUM_STEPS):
        train_step(model, optimizer, run, step, trace)
    return saved, trace


def load(kind: str, run: Run, path: Path) -> tuple[dict[str, torch.Tensor], Trace]:
    model, optimizer = make(kind, run, "loop", seed=1)
    with lowtide.sharded_optimizer(optimizer):
        model_state, state = get_state_dict(model, optimizer)
        content = {"model": model_state, "optimizer": state}
        dcp.load(content, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )
        loaded = state_of(model, get_state_dict(model, optimizer)[1])
    trace = Trace()
    for step in range(SAVED_AFTER, NUM_STEPS):
        train_step(model, optimizer, run, step, trace)
    return loaded, trace


@pytest.mark.parametrize("pair", [("local", "fsdp2"), ("fsdp2", "local")])
def test_checkpoint_crosses(pool_of, tmp_path, pair):
    writer, reader = pair
    run = Run(TINY, 2)
    pool = pool_of(2)
    saved = pool.run(save, writer, run, tmp_path / "checkpoint")
    loaded = pool.run(load, reader, run, tmp_path / "checkpoint")
    for rank in range(2):
        assert_same_tensors(loaded[rank][0], saved[rank][0], f"state of rank {rank}")
    assert_same_traces([trace for _, trace in loaded], [trace for _, trace in saved])


def gradients_seen() -> list[bool]:
    """The same one in a step, another one in the next, and no bytes of it behind
    that, whoever cleared it."""
    model, optimizer = make("local", Run(TINY, 2), "loop")
    rows = optimizer.param_groups[0]["params"][0]
    found = []
    for clear in (model.zero_grad, optimizer.zero_grad):
        rows._sharded.grad = torch.zeros_like(rows._sharded)
        found.append(rows.grad is rows.grad)
        storage = weakref.ref(rows.grad)
        clear()
        found += [rows.grad is None, storage() is None]
    rows._sharded.grad = torch.ones_like(rows._sharded)
    found.append(bool((rows.grad == 1).all()))
    return found


def test_a_gradient_is_made_once_and_not_kept(pool_of):
    assert pool_of(2).run(gradients_seen) == [[True] * 7] * 2


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators_of_a_step(kind: str) -> set[str]:
    """Of the optimizer that is the default on a device with foreach kernels."""
    run = Run(TINY, 1)
    model, _ = make(kind, run, "loop")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    given = lowtide.local_parameters(model) if kind == "local" else model.parameters()
    with mock.patch.object(
        optimizer_module,
        "_get_foreach_kernels_supported_devices",
        return_value=["cpu"],
    ):
        optimizer = torch.optim.AdamW(given)
        with Called() as called:
            optimizer.step()
    return called.names


def test_default_is_foreach_as_for_dtensors(pool_of):
    for kind in ("fsdp2", "local"):
        (names,) = pool_of(1).run(operators_of_a_step, kind)
        assert "_foreach_addcdiv_" in names, kind
        assert "addcdiv_" not in names, kind


def facts() -> list[Any]:
    run = Run(TINY, 2)
    model, optimizer = make("local", run, "loop")
    parameters = optimizer.param_groups[0]["params"]
    sharded = list(model.parameters())
    errors = []
    for call in (
        lambda: lowtide.local_parameters(nn.Linear(1, 1)),
        lambda: setattr(parameters[0], "grad", torch.zeros_like(parameters[0])),
    ):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    return [
        all(type(p.detach()) is torch.Tensor for p in parameters),
        all(
            p.data_ptr() == s.to_local().data_ptr()
            for p, s in zip(parameters, sharded, strict=True)
            if p.numel()
        ),
        errors,
    ]


def test_they_are_the_shards_bytes(pool_of):
    for plain, same_bytes, errors in pool_of(2).run(facts):
        assert plain and same_bytes
        assert errors == [
            "lowtide: local_parameters: expected a model sharded by lowtide, got "
            "Linear without a unit. Call fully_shard or wrap first.",
            "lowtide: local_parameters: expected .grad to be set to None, got a "
            "tensor. Change the gradient in place, or set the sharded parameter's; "
            "a state dict is taken inside `with lowtide.sharded_optimizer(...)`.",
        ]


def averages_of() -> list[Any]:
    """Copies as an exponential moving average keeps them."""
    model, _ = make("local", Run(TINY, 2), "loop")
    originals = lowtide.local_parameters(model)
    copies = copy.deepcopy([originals[0], originals[0], originals[1]])
    copies[0].data.add_(1.0)
    copies[0].grad = torch.ones_like(copies[0])
    return [
        type(copies[0]) is nn.Parameter,
        copies[0] is copies[1],
        bool((copies[0] == originals[0] + 1.0).all()),
        copies[0].requires_grad,
        originals[0].grad is None,
        copies[2].grad is None,
    ]


def test_copies_are_parameters_of_their_own(pool_of):
    for facts in pool_of(2).run(averages_of):
        assert facts == [True] * 6
