"""What lowtide does not do, it refuses by name, with the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowtide
from lowtide import MixedPrecisionPolicy, fully_shard

WORLD_SIZE = 2


def linear() -> Any:
    return nn.Linear(4, 4, bias=False)


def sharded() -> Any:
    return fully_shard(linear())


def empty_list() -> None:
    fully_shard([])


def module_list() -> None:
    fully_shard(nn.ModuleList([linear()]))


def twice() -> None:
    fully_shard(sharded())


def two_dimensional_mesh() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(linear(), mesh=mesh)


def placement() -> None:
    fully_shard(linear(), shard_placement_fn=lambda p: Shard(1))


def offload() -> None:
    fully_shard(linear(), offload_policy=CPUOffloadPolicy())


def smaller_mesh_after_forward() -> None:
    fully_shard(linear(), reshard_after_forward=7)


def reshard_after_forward_text() -> None:
    fully_shard(linear(), reshard_after_forward="yes")  # type: ignore[call-overload]


def fp16_reduce() -> None:
    fully_shard(linear(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))


def tied_over_units() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model[0])
    fully_shard(model[1])


def scalar() -> None:
    module = linear()
    module.temperature = nn.Parameter(torch.tensor(1.0))
    fully_shard(module)


def tensor_parallel() -> None:
    module = linear()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    weight = distribute_tensor(module.weight.data, mesh, [Replicate()])
    module.weight = nn.Parameter(weight)
    fully_shard(module)


def transposed() -> None:
    module = nn.Linear(4, 6, bias=False)
    module.weight = nn.Parameter(module.weight.data.t())
    fully_shard(module)


def reshard_setting() -> None:
    sharded().set_reshard_after_forward(1)


def foreign_prefetch() -> None:
    sharded().set_modules_to_forward_prefetch([linear()])


def foreign_backward_prefetch() -> None:
    sharded().set_modules_to_backward_prefetch([linear()])


def deepcopy() -> None:
    copy.deepcopy(sharded())


def child_before_its_root() -> None:
    model = nn.Sequential(linear(), linear())
    fully_shard(model[0])
    fully_shard(model)
    model[0](torch.zeros(1, 4))
    model(torch.zeros(1, 4))


def list_as_root() -> None:
    first, second = linear(), linear()
    fully_shard([first, second])
    second(first(torch.zeros(1, 4)))


def meta_parameters() -> None:
    with torch.device("meta"):
        module = linear()
    fully_shard(module)(torch.zeros(1, 4))


def second_order() -> None:
    module = sharded()
    loss = module(torch.ones(1, 4)).pow(2).sum()
    torch.autograd.backward(loss, create_graph=True)


def empty_budget() -> None:
    from lowtide._state.unit import unit_state

    module = sharded()
    module(torch.zeros(1, 4))
    state = unit_state(module)
    assert state is not None and state.root is not None
    state.root.gradient_budget = 0


def report_of_plain_model() -> None:
    lowtide.memory_report(linear())


# Who it is about and what came, with the exception's type.
REFUSALS: dict[Callable[[], None], tuple[str, str]] = {
    empty_list: (
        "ValueError",
        "fully_shard: expected a module or a list of modules, got an empty list. ",
    ),
    module_list: (
        "ValueError",
        "fully_shard: expected a module with a forward, got ModuleList. ",
    ),
    twice: (
        "ValueError",
        "fully_shard: expected a module that is not sharded yet, got FSDPLinear, ",
    ),
    two_dimensional_mesh: (
        "NotImplementedError",
        "fully_shard: expected a 1-D mesh, got 2 dimensions ",
    ),
    placement: (
        "NotImplementedError",
        "fully_shard: expected shard_placement_fn=None, got <function ",
    ),
    offload: (
        "NotImplementedError",
        "fully_shard: expected offload_policy=OffloadPolicy(), got CPUOffloadPolicy",
    ),
    smaller_mesh_after_forward: (
        "NotImplementedError",
        "fully_shard: expected reshard_after_forward to be a bool or the mesh size 2, "
        "got 7. ",
    ),
    reshard_after_forward_text: (
        "ValueError",
        "fully_shard: expected reshard_after_forward to be a bool or None, got 'yes'. ",
    ),
    fp16_reduce: (
        "NotImplementedError",
        "Linear.weight: expected reduce_dtype torch.float32, torch.bfloat16 or "
        "torch.float64, got torch.float16. ",
    ),
    tied_over_units: (
        "ValueError",
        "Linear.weight: expected a parameter that belongs to one unit, got one that "
        "is tied to Embedding.weight, which is already sharded. ",
    ),
    scalar: (
        "ValueError",
        "Linear.temperature: expected a parameter with at least one dimension to "
        "shard, got a scalar. ",
    ),
    tensor_parallel: (
        "NotImplementedError",
        "Linear.weight: expected a plain parameter, got a DTensor (Replicate(),). ",
    ),
    transposed: (
        "NotImplementedError",
        "Linear.weight: expected a contiguous parameter, got strides (1, 4) for "
        "shape (4, 6). ",
    ),
    reshard_setting: (
        "ValueError",
        "set_reshard_after_forward: expected a bool, got int. ",
    ),
    foreign_prefetch: (
        "ValueError",
        "prefetch list: expected modules sharded by lowtide, got Linear. ",
    ),
    foreign_backward_prefetch: (
        "ValueError",
        "prefetch list: expected modules sharded by lowtide, got Linear. ",
    ),
    deepcopy: (
        "AssertionError",
        "FSDPLinear: expected a module that is not sharded to deepcopy, got a "
        "sharded one. ",
    ),
    child_before_its_root: (
        "RuntimeError",
        "unit 'FSDPLinear': expected to run inside 'FSDPSequential', got a forward of "
        "its own before that of its root. ",
    ),
    list_as_root: (
        "RuntimeError",
        "unit 'Linear, Linear': expected one root module, got 2 modules sharded "
        "together. ",
    ),
    meta_parameters: (
        "RuntimeError",
        "unit 'FSDPLinear': expected parameters with storage, got meta tensors: "
        "weight. ",
    ),
    second_order: (
        "RuntimeError",
        "backward: expected create_graph=False for parameters sharded by lowtide, "
        "got create_graph=True ",
    ),
    empty_budget: (
        "ValueError",
        "gradient budget of 'FSDPLinear': expected a positive number of bytes, got 0. ",
    ),
    report_of_plain_model: (
        "ValueError",
        "memory_report: expected a model sharded or checkpointed by lowtide, got "
        "Linear without a unit or a checkpointed module. ",
    ),
}

UNSUPPORTED_METHODS = (
    "set_requires_all_reduce",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_post_optim_event",
    "set_reduce_scatter_divide_factor",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_unshard_in_backward",
    "set_allocate_memory_from_process_group_for_comm",
)


def error_of(call: Callable[[], None]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def collect_refusals() -> dict[str, tuple[str, str]]:
    return {call.__name__: error_of(call) for call in REFUSALS}


@pytest.fixture(scope="module")
def refusals(pool_of) -> dict[str, tuple[str, str]]:
    return pool_of(WORLD_SIZE).run(collect_refusals)[0]


@pytest.mark.parametrize("call", REFUSALS, ids=lambda call: call.__name__)
def test_refusal_says_what_was_expected_and_what_came(refusals, call):
    kind, start = REFUSALS[call]
    assert refusals[call.__name__][0] == kind, refusals[call.__name__]
    message = refusals[call.__name__][1]
    assert message.startswith("lowtide: " + start), message
    assert message.endswith(".") and len(message) > len("lowtide: " + start) + 10


def call_unsupported_methods() -> dict[str, tuple[str, str]]:
    module = sharded()
    return {
        name: error_of(lambda name=name: getattr(module, name)(object()))
        for name in UNSUPPORTED_METHODS
    }


def test_every_method_of_fsdp2_works_or_refuses_by_name(pool_of):
    for errors in pool_of(WORLD_SIZE).run(call_unsupported_methods):
        for name, (kind, message) in errors.items():
            assert kind == "NotImplementedError"
            assert message.startswith(f"lowtide: FSDPModule.{name}: expected a method ")
    methods = {name for name in vars(FSDPModule) if name.startswith("set_")}
    supported = {name for name in vars(lowtide.FSDPModule) if name.startswith("set_")}
    assert methods <= supported
    assert set(UNSUPPORTED_METHODS) < methods
