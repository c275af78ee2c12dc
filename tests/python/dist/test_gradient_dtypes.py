"""`grad_dtype` of parameters: the dtype of `.grad` and, without a reduce_dtype, that of
the reduction. FSDP2 follows it from torch 2.15 on, lowtide on any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from lowtide._torch_version import VERSION
from support.recorder import (
    Record,
    Recorder,
    assert_pattern_equals_fsdp2,
    assert_trains_as_fsdp2,
)
from support.systems import System, get_system

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    storage: torch.dtype = FP32
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    weights: Any = "own"  # their grad_dtype
    biases: Any = "own"
    on_wire: torch.dtype = FP32  # of all, by the rule below


# A gradient is rounded to reduce_dtype, or to its parameter's grad_dtype, or to the
# parameter's own dtype, but not where grad_dtype is None; reduced in the widest of its
# unit's; and rounded to grad_dtype.
CASES = {
    "unset": Case(storage=BF16, reduce=FP32),
    "narrower": Case(weights=BF16, biases=BF16, on_wire=BF16),
    "wider": Case(storage=BF16, weights=FP32, biases=FP32),
    "as_stored": Case(compute=BF16, weights=FP32, biases=FP32),
    "mixed": Case(weights=BF16),
    "reduced_in_another": Case(storage=BF16, reduce=BF16, weights=FP32, on_wire=BF16),
    "any": Case(storage=BF16, reduce=FP32, weights=None),
    "as_computed": Case(compute=BF16, weights=None, biases=None, on_wire=BF16),
    "as_computed_in_part": Case(compute=BF16, weights=None),
    "as_computed_beside_wider": Case(storage=BF16, weights=None, biases=FP32),
}


def module(case: Case) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8))
    return choose(case, model.to(case.storage))


def choose(case: Case, model: Any) -> Any:
    for parameter in model.parameters():
        chosen = case.weights if parameter.ndim == 2 else case.biases
        if chosen != "own":
            parameter.grad_dtype = chosen
    return model


def inputs(step: int, micro: int) -> torch.Tensor:
    seed = 100 * step + 10 * micro + dist.get_rank()
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def train(system_name: str, name: str, accumulate: bool, late: bool = False) -> Record:
    """``late``: the dtypes are chosen between ``fully_shard`` and the first forward."""
    case, system, record = CASES[name], get_system(system_name), Recorder()
    model = module(replace(case, weights="own", biases="own") if late else case)
    policy = system.MixedPrecisionPolicy(case.compute, case.reduce)
    system.fully_shard(model, mp_policy=policy)
    if late:
        choose(case, model)
    for step in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1 or not accumulate)
            x = inputs(step, micro).to(case.storage)
            model(x).float().pow(2).mean().backward()
            record.add_model(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad.to(parameter.dtype), alpha=-0.5)
        model.zero_grad()
        if step == 1 and not accumulate:
            # A conversion leaves both the policy and what it is for.
            model(inputs(7, 7).to(case.storage)).float().sum().backward()
            model.to(torch.float64).to(case.storage)
            record.add_model(model)
            model.zero_grad()
    return record.values


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_fsdp2(pool_of, name, accumulate):
    if name != "unset" and VERSION < (2, 15):
        pytest.skip("FSDP2 follows grad_dtype from 2.15 on")
    assert_trains_as_fsdp2(pool_of(2), train, name, accumulate)


@pytest.mark.skipif(VERSION < (2, 15), reason="FSDP2 follows it from 2.15 on")
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"unset"}))
def test_chosen_before_the_first_forward_is_followed(pool_of, name):
    assert_trains_as_fsdp2(pool_of(2), train, name, False, True)


def one_step(name: str) -> list[tuple[str, Any, Any, torch.Tensor, torch.Tensor]]:
    """Of every parameter the dtype of `.grad` and of its DTensor, the gradient, and
    what the rule makes of autograd's."""
    case, system = CASES[name], get_system("lowtide")
    model, alone = module(case), module(case)
    alone.to(case.compute or case.storage)
    policy = system.MixedPrecisionPolicy(case.compute, case.reduce)
    system.fully_shard(model, mp_policy=policy)
    x = inputs(0, 0).to(case.compute or case.storage)
    for one in (model, alone):
        one(x).float().pow(2).mean().backward()
    facts = []
    for (key, mine), other in zip(
        model.named_parameters(), alone.parameters(), strict=True
    ):
        chosen = case.weights if mine.ndim == 2 else case.biases
        shown = case.storage if chosen == "own" else chosen or case.on_wire
        as_it_comes = case.reduce is not None or chosen is None
        rounded = other.grad if as_it_comes else other.grad.to(shown)
        total = rounded.to(case.on_wire)
        dist.all_reduce(total)
        expected = (total / dist.get_world_size()).to(shown)
        rank = dist.get_rank()
        part = expected.chunk(dist.get_world_size())[rank]
        grad = mine.grad
        facts.append((key, grad.dtype, shown, grad.to_local().clone(), part.clone()))
        assert grad._spec.tensor_meta.dtype == grad.to_local().dtype
        assert grad.full_tensor().dtype == shown
    return facts


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_rounded_by_the_rule(pool_of, name):
    if name == "as_stored" and VERSION < (2, 15):
        pytest.skip("torch does not tell the parameter's own dtype from none set")
    if name == "as_computed_in_part" and VERSION < (2, 15):
        pytest.skip("without a grad_dtype gradients are reduced as they are computed")
    for facts in pool_of(2).run(one_step, name):
        for key, dtype, expected, grad, part in facts:
            assert dtype == expected, key
            assert torch.equal(grad, part), key


def with_others(name: str) -> float:
    """Clipping, an optimizer of local parameters, a step that is dropped and a state
    dict, with gradients of another dtype than the parameters'."""
    import lowtide

    case = CASES[name]
    model = module(case)
    policy = lowtide.MixedPrecisionPolicy(case.compute, case.reduce)
    lowtide.fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(lowtide.local_parameters(model), 0.1, foreach=False)
    x = inputs(0, 0).to(case.storage)
    model(x).float().pow(2).mean().backward()
    full = [p.grad.full_tensor().double() for p in model.parameters()]
    norm: Any = lowtide.clip_grad_norm_(model.parameters(), 1e9)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    expected = torch.stack([one.norm() for one in full]).norm()
    torch.testing.assert_close(norm.double(), expected, rtol=1e-2, atol=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with lowtide.step(model, optimizer):
        optimizer.step()
    model.load_state_dict(before, assign=True)
    optimizer.zero_grad()
    model(x).float().pow(2).mean().backward()
    for parameter, one in zip(model.parameters(), full, strict=True):
        assert torch.equal(parameter.grad.full_tensor().double(), one)
    return float(norm)


@pytest.mark.parametrize("name", ["narrower", "wider", "as_computed"])
def test_clipping_steps_and_loads_go_along(pool_of, name):
    first, second = pool_of(2).run(with_others, name)
    assert first == second > 0


# -- two weights in a unit, one of which may be left out -----------------------------


class Two(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(1, width, bias=False, dtype=dtype)
        self.second = nn.Linear(1, width, bias=False, dtype=dtype)
        self.used = ("first", "second")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((getattr(self, name)(x) for name in self.used), torch.zeros(()))


def backward(model: Any, value: float) -> None:
    x = torch.full((1, 1), value, dtype=model.first.weight.dtype, requires_grad=True)
    model(x).sum().backward()


def record_dtypes(record: Recorder, model: Any) -> None:
    for name, p in model.named_parameters():
        dtype = None if p.grad is None else p.grad.dtype
        record.add(f"{name}.grad {dtype}", p.grad)


def each_rank_uses_another(system: System, record: Recorder) -> None:
    """Zeros of a weight that no rank's backward has reached have its dtype, too."""
    for reduce in (FP32, BF16, None):
        model: Any = Two(3, BF16)
        model.first.weight.grad_dtype = FP32
        model.second.weight.grad_dtype = BF16
        system.fully_shard(model, mp_policy=system.MixedPrecisionPolicy(None, reduce))
        model.set_reduce_scatter_unused_params(True)
        rank = dist.get_rank()
        for used in (("first", "second"), ("second", "first"), ("first", "first")):
            model.used = (used[rank],)
            backward(model, rank + 1 / 3)
            record_dtypes(record, model)
            model.zero_grad()


def sums_that_wait_for_replicas(system: System, record: Recorder) -> None:
    """In the dtype of the reduction, whatever ``.grad`` has; a weight that the last
    microbatch does not use still gets its own."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    for reduce in (FP32, BF16, None):
        model: Any = Two(5, BF16)
        model.first.weight.grad_dtype = FP32
        model.second.weight.grad_dtype = BF16
        policy = system.MixedPrecisionPolicy(None, reduce)
        units = [model.first, model.second]
        system.fully_shard(units, mesh=mesh, mp_policy=policy)
        system.fully_shard(model, mesh=mesh)
        for values in ((256, 1, -256), (4, 5, 2)):
            for micro, value in enumerate(values):
                model.set_requires_all_reduce(micro == 2)
                model.used = ("first",) if value == 2 else ("first", "second")
                backward(model, value + dist.get_rank())
                record_dtypes(record, model)
            model.zero_grad()


def a_loaded_parameter_has_that_of_the_one_before(
    system: System, record: Recorder
) -> None:
    """Unless it has one itself, or the one that was loaded into."""
    for chosen in ("own", FP32, None):
        for assign in (False, True):
            for other in (False, True):
                model: Any = Two(2, BF16)
                weight = model.first.weight
                if chosen != "own":
                    weight.grad_dtype = chosen
                reduce = None if chosen == "own" else chosen
                policy = system.MixedPrecisionPolicy(None, reduce)
                system.fully_shard(model, mp_policy=policy)
                state = model.state_dict()
                state["first.weight"] = nn.Parameter(state["first.weight"])
                if other:
                    state["first.weight"].grad_dtype = torch.float64
                    model.second.weight.grad_dtype = torch.float64
                model.load_state_dict(state, assign=assign)
                model.to("cpu")
                for _ in range(2):
                    backward(model, 1 / 3)
                    record_dtypes(record, model)
                    dtypes = [p.grad_dtype for p in model.parameters()]
                    record.add(str(dtypes), None)
                    model.zero_grad()


class Many(nn.Module):
    """Weights of several dtypes of gradients, of which each backward uses some."""

    def __init__(self, dtypes: tuple[Any, ...], storage: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.ones(2 * i + 2, 8, dtype=storage))
            for i in range(len(dtypes))
        )
        for parameter, chosen in zip(self.weights, dtypes, strict=True):
            if chosen != "own":
                parameter.grad_dtype = chosen

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        sums = [(self.weights[i] * x).sum() * (i + 1) for i in used]
        return torch.stack(sums).sum()


def sharded_many(
    system: System, model: Any, dim: int, *, replicas: bool
) -> Callable[[int, int], torch.Tensor]:
    """And what is given to the forward of a step and backward."""
    names = ("replicas", "shards")
    shape = (2, 1) if replicas else (1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    system.fully_shard(
        model,
        mesh=mesh if replicas else mesh["shards"],
        shard_placement_fn=lambda _: Shard(dim),
        mp_policy=system.MixedPrecisionPolicy(reduce_dtype=FP32),
    )

    def row(step: int, micro: int) -> torch.Tensor:
        own = dist.get_rank() / 32 + step / 16 + micro / 8
        return torch.arange(8, dtype=BF16) / 32 + own

    return row


def backwards_that_use_some_weights(system: System, record: Recorder) -> None:
    """Those of one dtype are apart in the unit; a later backward adds to some."""
    dtypes = (FP16, None, "own", FP32, FP16, "own", None, FP32, "own")
    for dim in (0, 1):
        for replicas in (False, True):
            model: Any = Many(dtypes, FP32)
            row = sharded_many(system, model, dim, replicas=replicas)
            model.to(BF16)
            for step, used in enumerate(
                (range(9), (2, 3, 5, 7, 8), (1, 2, 4, 5, 6, 7))
            ):
                for micro, some in enumerate((used, used[::2])):
                    model(row(step, micro), some).backward()
                    record_dtypes(record, model)
                model.zero_grad()


def sums_of_other_weights_wait_for_replicas(system: System, record: Recorder) -> None:
    """In every backward; and some that a reset drops."""
    for dim in (0, 1):
        model: Any = Many((FP32, FP16, None, FP32), BF16)
        row = sharded_many(system, model, dim, replicas=True)
        backwards = ((1,), (1,), (0, 1), (1,), (0, 1), (2,), (3,))
        for step, used in enumerate(backwards):
            model.set_requires_all_reduce(step == len(backwards) - 1)
            x = row(step, 0)
            model(x.float() if step > 3 else x, used).backward()
        record_dtypes(record, model)
        model.zero_grad()
        model.set_requires_all_reduce(False)
        model(row(0, 0), (2,)).backward()
        model.reset_iter_state()
        model.set_requires_all_reduce(True)
        model(row(0, 0), (3,)).backward()
        record_dtypes(record, model)


PATTERNS = {
    pattern.__name__: pattern
    for pattern in (
        backwards_that_use_some_weights,
        sums_of_other_weights_wait_for_replicas,
        each_rank_uses_another,
        sums_that_wait_for_replicas,
        a_loaded_parameter_has_that_of_the_one_before,
    )
}


@pytest.mark.skipif(VERSION < (2, 15), reason="FSDP2 follows it from 2.15 on")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_equals_fsdp2(pool_of, pattern):
    assert_pattern_equals_fsdp2(pool_of(2), __name__, pattern)


def zeros_in_any_dtype() -> list[torch.Tensor]:
    """FSDP2 2.15 asks for a reduce_dtype."""
    model: Any = Two(2, FP32)
    model.first.weight.grad_dtype = None
    get_system("lowtide").fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    model.used = ("second",)
    backward(model, 1.0)
    return [p.grad.full_tensor() for p in model.parameters()]


def test_an_unused_parameter_of_any_dtype_has_zeros(pool_of):
    for first, second in pool_of(2).run(zeros_in_any_dtype):
        assert not first.any() and second.all()
