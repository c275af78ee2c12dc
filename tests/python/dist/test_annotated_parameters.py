"""Plain parameters with types of the `spmd_types` package beside `dp_mesh_dims`, as
torchtitan's from 0.3 on: stored as DTensors, computed with as they were. FSDP2 has it
from torch 2.15 on."""

from __future__ import annotations

from typing import Any

import pytest
import spmd_types
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import lowtide
from lowtide import DataParallelMeshDims
from lowtide._torch_version import STORES_ANNOTATED
from support.recorder import Record, Recorder, assert_trains_as_fsdp2
from support.systems import get_system

SHARDS = DataParallelMeshDims(shard="dp")
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Enter(torch.autograd.Function):
    """Every rank of the group goes on with it: its gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    """The sum of what the ranks of the group have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class MLP(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group("tp")
        place, ranks = mesh.get_local_rank("tp"), mesh.size(1)

        def parameter(whole: torch.Tensor, type_: Any, dim: int = -1) -> nn.Parameter:
            part = whole if dim < 0 else whole.chunk(ranks, dim)[place].contiguous()
            made = nn.Parameter(part.clone())
            types = {mesh.get_group("dp"): spmd_types.R, self.group: type_}
            return spmd_types.assert_type(made, types)

        self.scale = parameter(torch.ones(8), spmd_types.R)  # gradients in parts
        self.up = parameter(torch.randn(12, 8), spmd_types.S(0), 0)
        self.down = parameter(torch.randn(8, 12), spmd_types.S(1), 1)
        self.shift = parameter(torch.zeros(8), spmd_types.I)  # the same everywhere

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = Enter.apply(x, self.group) * self.scale
        out = F.linear(torch.tanh(F.linear(hidden, self.up)), self.down)
        return x + Leave.apply(out, self.group) + self.shift


def model_on(tp: int) -> tuple[nn.Module, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    with spmd_types.set_current_mesh(mesh):
        return nn.Sequential(MLP(mesh), MLP(mesh)), mesh


def train(
    system_name: str, tp: int, policy: dict[str, torch.dtype], late: bool = False
) -> Record:
    """``late``: gradients of two microbatches wait for those of the third."""
    model, mesh = model_on(tp)
    system = get_system(system_name)
    stored_on = mesh if tp > 1 else mesh["dp"]  # a dimension of one has no types
    settings = {"mesh": stored_on, "dp_mesh_dims": SHARDS}
    with spmd_types.set_current_mesh(stored_on):
        for module in (*model, model):
            mp_policy = MixedPrecisionPolicy(**policy)
            system.fully_shard(module, mp_policy=mp_policy, **settings)
    if system_name == "lowtide":
        model[0].register_forward_pre_hook(check_types(mesh))
    record = Recorder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + mesh.get_local_rank("dp"))
        for last in (False, False, True) if late else (True,):
            model.set_requires_gradient_sync(last)
            loss = model(torch.randn(4, 8, generator=generator)).pow(2).mean()
            loss.backward()
            record.add("loss", loss)
        for key, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == parameter.placements
            record.add(f"{key} {parameter.placements}", parameter)
            record.add(f"{key}.grad", parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return record.values


def check_types(mesh: DeviceMesh) -> Any:
    """What is computed with is plain and has its types, which FSDP2's has while types
    are checked."""
    wanted = {"scale": "R", "up": "V", "down": "V", "shift": "I"}
    groups = [mesh.get_group("dp")] + [mesh.get_group("tp")] * (mesh.size(1) > 1)

    def check(module: nn.Module, args: Any) -> None:
        for name, type_ in wanted.items():
            full = getattr(module, name)
            assert type(full) is nn.Parameter
            for group, of_group in zip(groups, ["R", type_], strict=False):
                found = spmd_types.get_axis_local_type(full, group)
                assert found is getattr(spmd_types, of_group)

    return check


@pytest.mark.skipif(not STORES_ANNOTATED, reason="FSDP2 does so from torch 2.15 on")
@pytest.mark.parametrize("policy", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_training_equals_fsdp2(pool_of, tp, policy):
    assert_trains_as_fsdp2(pool_of(2 * tp), train, tp, policy)


@pytest.mark.skipif(not STORES_ANNOTATED, reason="FSDP2 does so from torch 2.15 on")
def test_microbatches_that_wait_are_summed_as_by_fsdp2(pool_of):
    """But that gradients in parts are summed over the ranks in every microbatch, by
    FSDP2 in the last."""
    assert_trains_as_fsdp2(pool_of(2), train, 1, {}, True)
    ours, theirs = (
        pool_of(4).run(train, name, 2, {}, True) for name in ("lowtide", "fsdp2")
    )
    for mine, others in zip(ours, theirs, strict=True):
        for (name, value), (_, other) in zip(mine, others, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5, msg=name)


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def sharded(types: dict[str, Any], **settings: Any) -> None:
        module = nn.Linear(4, 4, bias=False)
        with spmd_types.set_current_mesh(mesh):
            groups = {mesh.get_group(name): type_ for name, type_ in types.items()}
            spmd_types.assert_type(module.weight, groups)
            lowtide.fully_shard(module, **settings)

    texts = []
    for types, settings in (
        ({"dp": spmd_types.R}, {"mesh": mesh, "dp_mesh_dims": SHARDS}),
        (
            {"dp": spmd_types.I, "tp": spmd_types.R},
            {"mesh": mesh, "dp_mesh_dims": SHARDS},
        ),
        *([({"tp": spmd_types.R}, {"mesh": mesh["dp"]})] if STORES_ANNOTATED else []),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            sharded(types, **settings)
        texts.append(str(error.value))
    return texts


def test_types_that_do_not_say_how_it_is_stored_are_refused(pool_of):
    for incomplete, summed, *without in pool_of(4).run(refusals):
        assert incomplete.startswith("lowtide: Linear.weight: expected a type along")
        assert summed.startswith("lowtide: Linear.weight: expected type R along the")
        for text in without:
            assert text.startswith("lowtide: Linear.weight: expected dp_mesh_dims be")
