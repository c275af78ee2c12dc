"""``grads="fused"``: what is asked of autograd stays autograd's, and what is not fused
says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import lowtide
from lowtide._sharding import fused
from support.bits import same_bits
from support.fused import DIM, HIDDEN, STEPS, Model, data, model_of, plain, uses
from support.recorder import Record, Recorder, assert_same_records

# -- what is asked for, and hooks ------------------------------------------------------


def grad_of_a_weight() -> tuple[torch.Tensor, torch.Tensor, int, dict[str, str]]:
    found = []
    for grads in ("exact", "fused"):
        model = model_of(grads)
        weight = []
        pre = model.blocks[0].up.register_forward_hook(
            lambda m, a, o, w=weight: w.append(m.weight)
        )
        loss = model(data(0)).pow(2).sum()
        found.append(torch.autograd.grad(loss, weight)[0])
        pre.remove()
    report = lowtide.memory_report(model).fused
    return found[0], found[1], uses(model), report.exact


def test_gradient_that_is_asked_for_is_returned(pool_of):
    ((exact, fused, added, why),) = pool_of(1).run(grad_of_a_weight)
    assert same_bits(fused, exact)
    assert added == 0
    assert why == {
        "blocks.0.up.weight": "asked for by torch.autograd.grad (1 use)",
    }


def create_graph() -> str:
    model = model_of("fused")
    try:
        model(data(0)).pow(2).sum().backward(create_graph=True)
    except RuntimeError as error:
        lowtide.abort_step(model)
        return str(error)
    return ""


def test_create_graph_is_refused_by_name(pool_of):
    (message,) = pool_of(1).run(create_graph)
    assert "expected create_graph=False for parameters sharded by lowtide" in message


def with_hook(grads: str) -> tuple[Record, list[int], dict[str, str]]:
    model, record, seen = model_of(grads), Recorder(), []

    def hook_once(module: nn.Module, args: Any) -> None:
        if not seen:
            seen.append(0)
            module.weight.register_hook(lambda g: seen.append(g.numel()) or 2 * g)

    model.blocks[0].up.register_forward_pre_hook(hook_once)
    plain(model, record)
    report = lowtide.memory_report(model).fused
    return record.values, seen, report.exact if report else {}


def test_hooks_on_the_weight_see_its_gradient(pool_of):
    for world_size in (1, 2):
        exact = pool_of(world_size).run(with_hook, "exact")
        fused = pool_of(world_size).run(with_hook, "fused")
        for (expected, _, _), (actual, seen, why) in zip(exact, fused, strict=True):
            assert_same_records(actual, expected)
            assert seen == [0] + [DIM * HIDDEN] * STEPS
            assert why == {
                "blocks.0.up.weight": "hooks on the parameter or its gradient (2 uses)"
            }


# -- classes ---------------------------------------------------------------------------


def built_from_classes() -> list[bool]:
    """Layers of the classes of a sharded model's layers."""
    model = model_of("fused")
    model(data(0)).sum().backward()
    layer = model.blocks[0].up
    other = type(layer)(DIM, 3)
    x = data(0, grad=True)
    y = other(x)
    y.sum().backward()
    copied = copy.deepcopy(other)
    return [
        torch.equal(y, F.linear(x, other.weight, other.bias)),
        other.weight.grad is not None and x.grad is not None,
        torch.equal(copied(x), y),
    ]


def test_the_class_of_a_fused_layer_builds_layers(pool_of):
    assert pool_of(1).run(built_from_classes) == [[True] * 3]


# -- eligibility -----------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight * 2, self.bias)


class NoForward(nn.Linear):
    pass


def reasons() -> tuple[tuple[str, ...], dict[str, str], list[str], str]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(DIM, DIM),
        OwnForward(DIM, DIM),
        NoForward(DIM, DIM),
        nn.Linear(DIM, DIM),
        nn.Linear(DIM, DIM),
        nn.Linear(DIM, DIM),
    )
    model[3].weight = model[0].weight
    model[4].weight.requires_grad_(False)
    lowtide.fully_shard(model, grads="fused")
    classes = [type(module).__name__ for module in model]
    x = data(0)
    model(x).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).sum().backward()
    report = lowtide.memory_report(model)
    return report.fused.fused, report.fused.exact, classes, str(report)


def test_report_says_what_is_fused_and_what_is_not(pool_of):
    ((fused, exact, classes, text),) = pool_of(1).run(reasons)
    assert fused == ("2.weight", "5.weight")
    assert exact == {
        "0.weight": "several modules share it",
        "1.weight": "its layer has its own forward",
        "4.weight": "frozen",
        "2.weight": "autocast (1 use)",
        "5.weight": "autocast (1 use)",
    }
    assert classes == ["Linear", "OwnForward", "NoForward", *["Linear"] * 3]
    assert "weight gradients: 2 fused, 3 exact" in text
    assert "  1.weight: its layer has its own forward" in text


def reduced_in_bf16() -> dict[str, str]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    model: Any = nn.Sequential(nn.Linear(DIM, DIM))
    lowtide.fully_shard(model, mp_policy=policy, grads="fused")
    return lowtide.memory_report(model).fused.exact


def test_bf16_sums_stay_exact(pool_of):
    (exact,) = pool_of(1).run(reduced_in_bf16)
    assert exact == {
        "Linear.weight": "torch.bfloat16 products, summed in torch.bfloat16"
    }


def of_any_dtype() -> dict[str, str]:
    model: Any = nn.Sequential(nn.Linear(DIM, DIM))
    model[0].weight.grad_dtype = None
    lowtide.fully_shard(model, grads="fused")
    model(data(0)).sum().backward()
    return lowtide.memory_report(model).fused.exact


def test_sums_of_any_dtype_stay_exact(pool_of):
    (exact,) = pool_of(1).run(of_any_dtype)
    assert exact == {
        "0.weight": "gradients of any dtype: grad_dtype and reduce_dtype are None"
    }


@pytest.fixture
def tunable(monkeypatch) -> Callable[[bool], None]:
    def enabled(value: bool) -> None:
        monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: value)

    enabled(False)
    return enabled


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((7, 5), torch.bfloat16, "compute capability 7.5 < 8.0"),
        ((7, 5), torch.float16, "compute capability 7.5 < 8.0"),
        ((7, 5), torch.float32, None),
        ((8, 0), torch.bfloat16, None),
        ((9, 0), torch.bfloat16, None),
    ],
)
def test_products_of_an_old_gpu_stay_exact(
    monkeypatch, tunable, capability, dtype, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fused._obstacle_of_device(dtype, torch.device("cuda", 0)) == expected


def test_half_products_stay_exact_with_tunable_op(monkeypatch, tunable):
    """torch refuses such GEMMs then."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tunable(True)
    device = torch.device("cuda", 0)
    for dtype in (torch.bfloat16, torch.float16):
        why = fused._obstacle_of_device(dtype, device)
        assert why == "TunableOp has no GEMM of half factors into fp32"
    assert fused._obstacle_of_device(torch.float32, device) is None


def test_products_stay_exact_on_rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    why = fused._obstacle_of_device(torch.float32, torch.device("cuda", 0))
    assert why == "ROCm: no aten::addmm.dtype_out"


def used_twice() -> tuple[Record, Record, dict[str, str]]:
    records = []
    for grads in ("exact", "fused"):
        model, record = model_of(grads), Recorder()
        model.blocks[0].odd.weight  # noqa: B018
        model.run_block = lambda block, x: block(block(x))
        plain(model, record)
        records.append(record.values)
    return records[0], records[1], lowtide.memory_report(model).fused.exact


def test_second_use_in_a_backward_is_autograds(pool_of):
    ((exact, fused, why),) = pool_of(1).run(used_twice)
    assert_same_records(fused, exact)
    assert why["blocks.0.odd.weight"] == "used more than once in a backward (2 uses)"


def refused() -> str:
    try:
        lowtide.fully_shard(nn.Linear(2, 2), grads="fast")  # type: ignore[call-overload]
    except ValueError as error:
        return str(error)
    return ""


def test_other_modes_are_refused(pool_of):
    (message,) = pool_of(1).run(refused)
    assert message == (
        "lowtide: fully_shard: expected grads to be 'exact' or 'fused', got 'fast'. "
        "Leave it out for FSDP2's gradients."
    )


def differing() -> str:
    grads = "fused" if dist.get_rank() == 0 else "exact"
    model: Any = nn.Sequential(nn.Linear(DIM, DIM))
    lowtide.fully_shard(model, grads=grads)
    try:
        model(data(0))
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_differ_hear_about_it(pool_of):
    for message in pool_of(2).run(differing):
        assert "expected the same units and parameters in the same order" in message
        assert "fused gradient" in message


def wrapped() -> tuple[str, ...]:
    torch.manual_seed(0)
    model = lowtide.wrap(Model(), grads="fused")
    model(data(0)).sum().backward()
    return lowtide.memory_report(model).fused.fused


def test_wrap_passes_it_to_every_unit(pool_of):
    (fused,) = pool_of(1).run(wrapped)
    blocks = [
        f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down", "odd")
    ]
    assert sorted(fused) == sorted([*blocks, "head.weight"])
