"""Which parameters modules show behind a forward, a backward and what is called in
between, under every setting that says what stays gathered: FSDP2's, with its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from support.recorder import Recorder, assert_pattern_equals_fsdp2
from support.systems import System

Pattern = Callable[[System, Recorder], None]
RESHARDS = (True, False, 2, 1, None)


def net() -> Any:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(3, 3))


def units_of(model: Any) -> list[Any]:
    return [model[0][0], model[0][2], model]


def rows(step: int = 0) -> torch.Tensor:
    return torch.full((2, 3), 1.0 + dist.get_rank() + step)


def show(record: Recorder, when: str, model: nn.Module) -> None:
    """``s``: a shard, ``f``: a full parameter; and its values."""
    kinds = ["s" if isinstance(p, DTensor) else "f" for p in model.parameters()]
    record.add(f"{when}: {''.join(kinds)}", None)
    for name, p in model.named_parameters():
        record.add(name, p.detach())


def step(record: Recorder, model: Any, *, between: Callable[[], None]) -> None:
    for number in range(2):
        loss = model(rows(number)).square().sum()
        show(record, "forward", model)
        between()
        show(record, "between", model)
        loss.backward()
        show(record, "backward", model)
        record.add_model(model)
        model.zero_grad()


def nothing() -> None:
    pass


def reshard_after_forward(system: System, record: Recorder) -> None:
    for reshard in RESHARDS:
        for units in (units_of, lambda model: [model]):
            model = net()
            for unit in units(model):
                system.fully_shard(unit, reshard_after_forward=reshard)
            show(record, f"{reshard}", model)
            step(record, model, between=nothing)


def set_afterwards(system: System, record: Recorder) -> None:
    """With and without recursion, against what `fully_shard` was told, or not told."""
    for told in (None, True, False):
        for value in (True, False):
            for recurse in (True, False):
                model = net()
                for unit in units_of(model):
                    system.fully_shard(unit, reshard_after_forward=told)
                model.set_reshard_after_forward(value, recurse=recurse)
                step(record, model, between=nothing)


def resharded_by_hand(system: System, record: Recorder) -> None:
    """Between forward and backward, which gathers again."""
    model = net()
    for unit in units_of(model):
        system.fully_shard(unit, reshard_after_forward=False)

    def reshard() -> None:
        for unit in units_of(model):
            unit.reshard()

    step(record, model, between=reshard)


def gathered_before_the_first_forward(system: System, record: Recorder) -> None:
    model = net()
    for unit in units_of(model):
        system.fully_shard(unit)
    model.unshard()
    show(record, "unshard", model)
    model[0][0].unshard(async_op=True).wait()
    show(record, "unshard", model)
    step(record, model, between=nothing)


def a_root_without_parameters(system: System, record: Recorder) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for unit in (*model, model):
        system.fully_shard(unit)
    handle = model.unshard(async_op=True)
    handle.wait()
    record.add(str(model.unshard()), None)
    show(record, "unshard", model)
    step(record, model, between=nothing)


def a_state_dict_in_between(system: System, record: Recorder) -> None:
    """Shows shards, and the bytes that are trained."""
    model = net()
    for unit in units_of(model):
        system.fully_shard(unit, reshard_after_forward=False)
    kept = model.state_dict()
    places = {name: value.to_local().data_ptr() for name, value in kept.items()}

    def state() -> None:
        for name, value in model.state_dict().items():
            record.add(f"state {name} {type(value).__name__}", value)
            assert value.to_local().data_ptr() == places[name]

    step(record, model, between=state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(rows()).sum().backward()
    optimizer.step()
    for name, value in kept.items():  # made before the step
        record.add(f"kept {name}", value)


def values_loaded_in_place(system: System, record: Recorder) -> None:
    model = net()
    for unit in units_of(model):
        system.fully_shard(unit)
    places = [p.to_local().data_ptr() for p in model.parameters()]
    loaded = {
        name: value.detach().clone().fill_(42 + dist.get_rank())
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(loaded)
    assert system.name == "fsdp2" or places == [
        p.to_local().data_ptr() for p in model.parameters()
    ]
    step(record, model, between=nothing)


def strides_along_another_dimension(system: System, record: Recorder) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    for unit in (*model, model):
        system.fully_shard(unit, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    for layer in model:
        layer.register_forward_pre_hook(
            lambda module, _: record.add(
                str([(p.stride(), p.is_contiguous()) for p in module.parameters()]),
                None,
            )
        )
    model(torch.ones(2, 4)).sum().backward()
    for p in model.parameters():
        for one in (p, p.to_local(), p.grad, p.grad.to_local()):
            record.add(f"{tuple(one.stride())} {one.is_contiguous()}", one)


# -- models without storage ------------------------------------------------------------


def on_meta(system: System, width: int, **policy: Any) -> Any:
    with torch.device("meta"):
        model: Any = nn.Sequential(
            nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)
        )
        for unit in (*model, model):
            precision = system.MixedPrecisionPolicy(**policy)
            system.fully_shard(unit, mp_policy=precision)
    return model


def train(model: Any, record: Recorder, width: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number in range(2):
        x = torch.full((2, width), 1.0 + number + dist.get_rank())
        model(x).float().square().sum().backward()
        record.add_model(model)
        optimizer.step()
        optimizer.zero_grad()


def initialised_by_its_modules(system: System, record: Recorder) -> None:
    """Every rank draws what its shard gets; of width 1 one rank has nothing."""
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for width in (8, 3, 1):
        for policy in ({}, half):
            model = on_meta(system, width, **policy)
            record.add(str({p.device.type for p in model.parameters()}), None)
            model.to_empty(device="cpu")
            torch.manual_seed(3)
            for module in model:
                module.reset_parameters()
            train(model, record, width)


def replaced_before_the_first_forward(system: System, record: Recorder) -> None:
    """By a parameter that is computed of others'."""
    model = on_meta(system, 4)
    for layer in (model[0], model[2]):
        layer.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            for p in layer.parameters():
                p.copy_(distribute_tensor(torch.randn(p.shape), p.device_mesh))
        norms = torch.linalg.norm(model[0].weight, dim=1)
    model[1].weight = nn.Parameter(norms)
    model[1].bias = nn.Parameter(norms + 1)
    train(model, record, 4)


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        reshard_after_forward,
        set_afterwards,
        resharded_by_hand,
        gathered_before_the_first_forward,
        a_root_without_parameters,
        a_state_dict_in_between,
        values_loaded_in_place,
        strides_along_another_dimension,
        initialised_by_its_modules,
        replaced_before_the_first_forward,
    )
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_equals_fsdp2(pool_of, pattern):
    assert_pattern_equals_fsdp2(pool_of(2), __name__, pattern)
