"""What lowtide does not do, it refuses by name, with the next step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import lowtide
from lowtide import MixedPrecisionPolicy, OffloadPolicy, fully_shard

WORLD_SIZE = 2


def linear() -> Any:
    return nn.Linear(4, 4, bias=False)


def sharded() -> Any:
    return fully_shard(linear())


def nothing() -> None:
    fully_shard(None)  # type: ignore[call-overload]


def list_with_a_tensor() -> None:
    fully_shard([linear(), linear().weight])


def dtype_as_precision() -> None:
    fully_shard(linear(), mp_policy=torch.float16)  # type: ignore[call-overload]


def name_as_precision() -> None:
    fully_shard(linear(), mp_policy="bf16")  # type: ignore[call-overload]


def precision_of_fsdp1() -> None:
    policy: Any = MixedPrecision(param_dtype=torch.bfloat16)
    fully_shard(linear(), mp_policy=policy)


def group_as_mesh() -> None:
    group: Any = torch.distributed.group.WORLD
    fully_shard(linear(), mesh=group)


def flag_as_offload_policy() -> None:
    fully_shard(linear(), offload_policy=True)  # type: ignore[call-overload]


def sharded_by_torch() -> None:
    model = nn.Sequential(linear(), linear())
    torch_fully_shard(model[1])
    lowtide.wrap(model)


def replaced_parameter() -> None:
    module = sharded()
    module.weight = nn.Parameter(torch.zeros(4, 4))
    module(torch.zeros(1, 4))


def removed_parameter() -> None:
    module = sharded()
    module.weight = None
    module(torch.zeros(1, 4))


def empty_list() -> None:
    fully_shard([])


def module_list() -> None:
    fully_shard(nn.ModuleList([linear()]))


def twice() -> None:
    fully_shard(sharded())


def three_dimensional_mesh() -> None:
    names = ("replicate", "shard", "more")
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=names)
    fully_shard(linear(), mesh=mesh)


def parameter_on_other_devices() -> None:
    module = linear()
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cuda")
    meta = TensorMeta(module.weight.shape, module.weight.stride(), torch.float32)
    spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)
    whole = DTensor(module.weight.detach(), spec, requires_grad=False)
    module.weight = nn.Parameter(whole)
    fully_shard(module, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))


def placement_of_another_kind() -> None:
    fully_shard(linear(), shard_placement_fn=lambda p: Replicate())  # type: ignore


def placed_over(mesh_info: object) -> None:
    placed = lowtide.ShardPlacementResult(None, mesh_info)  # type: ignore[arg-type]
    fully_shard(linear(), shard_placement_fn=lambda p: placed)


def mesh_of_a_parameter_by_name() -> None:
    placed_over("dp")


def replicas_alone_for_a_parameter() -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    placed_over(DDPMeshInfo(mesh, replicate_mesh_dim=0))


def three_dimensions_for_a_parameter() -> None:
    placed_over(init_device_mesh("cpu", (1, WORLD_SIZE, 1)))


def kept_part_of_a_parameters_own_shards() -> None:
    replicas = init_device_mesh("cpu", (WORLD_SIZE, 1))
    placed = lowtide.ShardPlacementResult(None, replicas)  # type: ignore[arg-type]
    module = nn.Linear(4, 4)
    fully_shard(
        module,
        reshard_after_forward=2,
        shard_placement_fn=lambda p: placed if p is module.bias else None,
    )


def tied_over_two_meshes() -> None:
    model = nn.Sequential(linear(), linear())
    model[1].weight = model[0].weight
    names = ("replicas", "shards")
    replicas = init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=names)
    fully_shard(model[0], mesh=replicas)
    fully_shard(model[1])
    fully_shard(model)
    model(torch.zeros(1, 4))


def placement_out_of_range() -> None:
    fully_shard(linear(), shard_placement_fn=lambda p: Shard(2))


def uneven_columns() -> None:
    module = nn.Linear(3, 4, bias=False)
    fully_shard(module, shard_placement_fn=lambda p: Shard(1))


class ElsewherePolicy(OffloadPolicy):
    pass


def offload_elsewhere() -> None:
    fully_shard(linear(), offload_policy=ElsewherePolicy())


def smaller_mesh_after_forward() -> None:
    fully_shard(linear(), reshard_after_forward=7)


def reshard_after_forward_text() -> None:
    fully_shard(linear(), reshard_after_forward="yes")  # type: ignore[call-overload]


def fp8_reduce() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float8_e4m3fn)
    fully_shard(linear(), mp_policy=policy)


def fp8_gradients() -> None:
    module = linear()
    module.weight.grad_dtype = torch.float8_e4m3fn
    fully_shard(module)


def scalar() -> None:
    module = linear()
    module.temperature = nn.Parameter(torch.tensor(1.0))
    fully_shard(module)


def transposed() -> None:
    module = nn.Linear(4, 6, bias=False)
    module.weight = nn.Parameter(module.weight.data.t())
    fully_shard(module)


def no_buffers() -> None:
    sharded().set_reduce_scatter_max_input_buffers(1)
    sharded().set_reduce_scatter_max_input_buffers(0)


def buffers_yes() -> None:
    sharded().set_reduce_scatter_max_input_buffers(True)


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
    from lowtide._sharding.unit import unit_state

    module = sharded()
    module(torch.zeros(1, 4))
    state = unit_state(module)
    assert state is not None and state.root is not None
    state.root.gradient_budget = 0


def report_of_plain_model() -> None:
    lowtide.memory_report(linear())


# Who it is about and what came, with the exception's type.
REFUSALS: dict[Callable[[], None], tuple[str, str]] = {
    nothing: (
        "ValueError",
        "fully_shard: expected a module, got None. ",
    ),
    list_with_a_tensor: (
        "ValueError",
        "fully_shard: expected a module, got Parameter. ",
    ),
    dtype_as_precision: (
        "ValueError",
        "fully_shard: expected mp_policy to be a MixedPrecisionPolicy, got "
        "torch.float16. Write lowtide.MixedPrecisionPolicy(param_dtype=torch.float16, ",
    ),
    name_as_precision: (
        "ValueError",
        "fully_shard: expected mp_policy to be a MixedPrecisionPolicy, got 'bf16'. ",
    ),
    precision_of_fsdp1: (
        "ValueError",
        "fully_shard: expected mp_policy to be a MixedPrecisionPolicy, got "
        "MixedPrecision. ",
    ),
    group_as_mesh: (
        "ValueError",
        "fully_shard: expected mesh to be a DeviceMesh, got ProcessGroup. ",
    ),
    flag_as_offload_policy: (
        "ValueError",
        "fully_shard: expected offload_policy to be a CPUOffloadPolicy or None, got "
        "bool. ",
    ),
    sharded_by_torch: (
        "ValueError",
        "wrap: expected a module that torch's fully_shard has not sharded, got "
        "FSDPLinear at '1', ",
    ),
    replaced_parameter: (
        "ValueError",
        "weight: expected a DTensor in place of the one that fully_shard left there, "
        "got a Parameter of shape (4, 4). ",
    ),
    removed_parameter: (
        "ValueError",
        "Linear.weight: expected the parameter that fully_shard left there, got none. ",
    ),
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
    three_dimensional_mesh: (
        "ValueError",
        "fully_shard: expected a mesh of one dimension, or of replicas and shards, got "
        "3 dimensions ",
    ),
    parameter_on_other_devices: (
        "ValueError",
        "Linear.weight: expected a DTensor on a mesh of cpu, as the one that "
        "fully_shard was given, got one of cuda. ",
    ),
    placement_of_another_kind: (
        "ValueError",
        "Linear.weight: expected shard_placement_fn to return Shard or None, got "
        "Replicate(). ",
    ),
    mesh_of_a_parameter_by_name: (
        "ValueError",
        "Linear.weight: expected mesh_info to be torch's FSDPMeshInfo or HSDPMeshInfo, "
        "or a DeviceMesh, got 'dp'. ",
    ),
    replicas_alone_for_a_parameter: (
        "NotImplementedError",
        "Linear.weight: expected mesh_info of one dimension, of shards, or of two, "
        "replicas and shards, got DDPMeshInfo(",
    ),
    three_dimensions_for_a_parameter: (
        "NotImplementedError",
        "Linear.weight: expected mesh_info of one dimension, of shards, or of two, "
        "replicas and shards, got DeviceMesh(",
    ),
    kept_part_of_a_parameters_own_shards: (
        "ValueError",
        "fully_shard: expected reshard_after_forward to be a bool or a factor of the 1 "
        "shards, got 2. ",
    ),
    tied_over_two_meshes: (
        "ValueError",
        "Linear.weight: expected modules that share a weight to be sharded over one "
        "mesh, got it sharded over DeviceMesh(",
    ),
    placement_out_of_range: (
        "ValueError",
        "Linear.weight: expected shard_placement_fn to return a dimension of a "
        "parameter with 2, got 2. ",
    ),
    uneven_columns: (
        "NotImplementedError",
        "Linear.weight: expected dimension 1, which is to be split, to be a multiple "
        "of 2, got 3. ",
    ),
    offload_elsewhere: (
        "NotImplementedError",
        "fully_shard: expected offload_policy to be a CPUOffloadPolicy or None, got "
        "ElsewherePolicy(). ",
    ),
    smaller_mesh_after_forward: (
        "ValueError",
        "fully_shard: expected reshard_after_forward to be a bool or a factor of the 2 "
        "shards, got 7. ",
    ),
    reshard_after_forward_text: (
        "ValueError",
        "fully_shard: expected reshard_after_forward to be a bool or None, got 'yes'. ",
    ),
    fp8_reduce: (
        "NotImplementedError",
        "Linear.weight: expected reduce_dtype torch.float32, torch.bfloat16, "
        "torch.float16 or torch.float64, got torch.float8_e4m3fn. ",
    ),
    fp8_gradients: (
        "NotImplementedError",
        "Linear.weight: expected grad_dtype torch.float32, torch.bfloat16, "
        "torch.float16 or torch.float64, got torch.float8_e4m3fn. ",
    ),
    no_buffers: (
        "ValueError",
        "FSDPModule.set_reduce_scatter_max_input_buffers: expected a positive number, "
        "got 0. ",
    ),
    buffers_yes: (
        "TypeError",
        "FSDPModule.set_reduce_scatter_max_input_buffers: expected an int, got bool. ",
    ),
    scalar: (
        "ValueError",
        "Linear.temperature: expected a parameter with at least one dimension to "
        "shard, got a scalar. ",
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
        "Linear: expected a module that is not sharded to deepcopy, got a "
        "sharded one. ",
    ),
    child_before_its_root: (
        "RuntimeError",
        "unit 'Linear': expected to run inside 'Sequential', got a forward of "
        "its own before that of its root. ",
    ),
    list_as_root: (
        "RuntimeError",
        "unit 'Linear, Linear': expected one root module, got 2 modules sharded "
        "together. ",
    ),
    meta_parameters: (
        "RuntimeError",
        "unit 'Linear': expected parameters with storage, got meta tensors: weight. ",
    ),
    second_order: (
        "RuntimeError",
        "backward: expected create_graph=False for parameters sharded by lowtide, "
        "got create_graph=True ",
    ),
    empty_budget: (
        "ValueError",
        "gradient budget of 'Linear': expected a positive number of bytes, got 0. ",
    ),
    report_of_plain_model: (
        "ValueError",
        "memory_report: expected a model sharded or checkpointed by lowtide, got "
        "Linear without a unit or a checkpointed module. ",
    ),
}


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


def test_every_method_of_fsdp2_is_lowtides_own():
    methods = {name for name in vars(FSDPModule) if not name.startswith("__")}
    own = {name for name in vars(lowtide.FSDPModule) if not name.startswith("__")}
    assert methods <= own
    assert "set_all_reduce_hook" in methods


def shard_few_rows(shapes: list[tuple[int, ...]]) -> list[str]:
    from lowtide._sharding import parameter

    module = nn.Module()
    for i, shape in enumerate(shapes):
        module.register_parameter(f"w{i}", nn.Parameter(torch.zeros(shape)))
    before, parameter.MUCH_PADDING = parameter.MUCH_PADDING, 0
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lowtide.fully_shard(module)
    finally:
        parameter.MUCH_PADDING = before
    return [str(one.message) for one in caught]


def test_padding_of_a_whole_parameter_is_said_on_one_rank(pool_of):
    """Experts fewer than ranks."""
    shapes = [(1, 8, 4), (1, 3), (2, 4), (3, 4)]
    first, second = (
        f"lowtide: Module.{name}: expected at least as many rows as ranks, got {shape} "
        f"split along dimension 0 over 2 ranks: every gather and reduction "
        f"moves 2 times its bytes, as with FSDP2. Pass {what}."
        for name, shape, what in (
            ("w0", (1, 8, 4), "a shard_placement_fn that returns Shard(1) for it"),
            ("w1", (1, 3), "a mesh of fewer ranks"),
        )
    )
    assert pool_of(2).run(shard_few_rows, shapes) == [[first, second], []]
