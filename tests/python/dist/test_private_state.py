"""Programs that read FSDP2's private state find it of lowtide's units, or an error that
says what they read."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

import lowtide
from lowtide.integrations import bind
from support.recorder import (
    Record,
    Recorder,
    assert_same_records,
    assert_trains_as_fsdp2,
    finish_step,
)
from support.systems import System, get_system

WIDTH = 12
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
WHOLE = MixedPrecisionPolicy(torch.float32, torch.float32)


class Block(nn.Module):
    """With a part that is reference-sensitive."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) * self.gate(x).sigmoid()


def two_blocks() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block())


def sharded(system: System) -> Any:
    model = two_blocks()
    for block in model:
        system.fully_shard(block, mp_policy=HALF)
    return system.fully_shard(model)


def begun(system_name: str) -> tuple[Any, Any, Recorder, torch.Tensor]:
    """A model, its optimizer, what is recorded, and the rank's inputs."""
    model = sharded(get_system(system_name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return model, optimizer, Recorder(), torch.randn(4, WIDTH, generator=generator)


def units(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def described(model: Any) -> list[tuple[Any, ...]]:
    """What optimizers, checkers and converters of other people's find out."""
    found: list[tuple[Any, ...]] = []
    for unit in units(model):
        state = unit._get_fsdp_state()
        found.append((state._mp_policy.param_dtype, state._mp_policy.reduce_dtype))
        group = state._fsdp_param_group
        if group is None:
            continue
        mesh = group.mesh_info.mesh
        found.append((mesh.shape, group.mesh_info.shard_mesh_dim))
        for one in group.fsdp_params:
            owner = one._module_info
            assert getattr(owner.module, owner.param_name) is one.sharded_param
            places = (one.sharded_param.placements, one.fsdp_placement)
            sizes = (one._orig_size, one.sharded_size, one.mesh_info.mesh.size())
            found.append((owner.param_name, one._param_fqn, *places, *sizes))
    return found


def descriptions(system_name: str) -> list[Any]:
    model = sharded(get_system(system_name))
    before = described(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    return [before, described(model)]


def test_parameters_and_sizes_are_those_of_fsdp2(pool_of):
    pool = pool_of(2)
    theirs = pool.run(descriptions, "fsdp2")
    assert pool.run(descriptions, "lowtide") == theirs
    assert len(theirs[0][0]) > 10


def stay_gathered(system_name: str) -> Record:
    """An evaluation that has units keep what they gathered, by their private fields,
    and training after it."""
    model, optimizer, record, x = begun(system_name)
    for _ in range(2):
        kept = {}
        for unit in units(model):
            unit.unshard()
            if group := unit._get_fsdp_state()._fsdp_param_group:
                kept[group] = group.post_forward_mesh_info
                group.post_forward_mesh_info = None
        with torch.no_grad():
            record.add("evaluated", model(x))
        assert not any(hasattr(p, "placements") for p in model.parameters())
        for unit in units(model):
            if group := unit._get_fsdp_state()._fsdp_param_group:
                group.post_forward_mesh_info = kept[group]
            unit.reshard()
        model(x).pow(2).sum().backward()
        finish_step(model, optimizer, record)
    return record.values


def test_units_are_told_to_stay_gathered(pool_of):
    assert_trains_as_fsdp2(pool_of(2), stay_gathered)


def run_without_hooks(system_name: str) -> Record:
    """An evaluation on gathered parameters, with FSDP2's hooks off, which it knows by
    their module; twice, as nothing reshards in between."""
    model, optimizer, record, x = begun(system_name)
    for _ in range(2):
        taken: list[tuple[Any, str, Any]] = []
        for unit in units(model):
            unit.unshard()
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(unit, name)
                kept = {
                    key: hook
                    for key, hook in hooks.items()
                    if not hook.__module__.startswith("torch.distributed.fsdp")
                }
                taken.append((unit, name, hooks))
                setattr(unit, name, type(hooks)(kept))
        with torch.no_grad():
            for _ in range(2):
                record.add("evaluated", model(x.to(torch.bfloat16)))
                for name, p in model.named_parameters():
                    assert not hasattr(p, "placements"), name
                    record.add(name, p)
        for unit, name, hooks in taken:
            setattr(unit, name, hooks)
        for unit in units(model):
            unit.reshard()
        model(x).pow(2).sum().backward()
        finish_step(model, optimizer, record)
    return record.values


def test_hooks_are_taken_off_and_put_back(pool_of):
    assert_trains_as_fsdp2(pool_of(2), run_without_hooks)


def put_aside(system_name: str, fails: bool) -> Record:
    """As verl does with VeOmni's models: whatever was under way is over."""
    model, optimizer, record, x = begun(system_name)
    for step in range(3):
        model(x).pow(2).sum().backward()
        finish_step(model, optimizer, record)
        if fails and step == 1:  # between a unit's hooks
            model[1].down.register_forward_pre_hook(fail_once())
            with pytest.raises(KeyError):
                model(x)
        for unit in units(model):
            if (group := unit._get_fsdp_state()._fsdp_param_group) is not None:
                group._training_state = TrainingState.IDLE
        for unit in units(model):
            unit.reshard()
        model.cpu()
        model.to("cpu")
    return record.values


def fail_once() -> Any:
    left = [KeyError("refused")]

    def fail(*_: Any) -> None:
        if left:
            raise left.pop()

    return fail


def test_a_model_is_put_aside_whatever_was_under_way(pool_of):
    pool = pool_of(2)
    assert_trains_as_fsdp2(pool, put_aside, False)
    for failed, whole in zip(
        pool.run(put_aside, "lowtide", True),
        pool.run(put_aside, "lowtide", False),
        strict=True,
    ):
        assert_same_records(failed, whole)


def once(system: System, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_state import (
        _get_module_fsdp_state,
    )

    if _get_module_fsdp_state(module) is None:
        system.fully_shard(module, mp_policy=policy)


def shard_what_is_not(system_name: str) -> Record:
    """The parts before what is around them, each unless it has been."""
    system = get_system(system_name)
    model: Any = two_blocks()
    with bind() if system_name == "lowtide" else nullcontext():
        for _ in range(2):
            for block in model:
                once(system, block.gate, WHOLE)
                once(system, block, HALF)
            once(system, model, WHOLE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    record = Recorder()
    for step in range(2):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        loss = model(torch.randn(4, WIDTH, generator=generator)).pow(2).sum()
        record.add("loss", loss)
        loss.backward()
        finish_step(model, optimizer, record)
    return record.values


def test_programs_that_ask_whether_a_module_is_sharded(pool_of):
    assert_trains_as_fsdp2(pool_of(2), shard_what_is_not)


def hide_the_function() -> list[Any]:
    """One that was taken before `bind`, in a closure."""
    theirs = torch.distributed.fsdp.fully_shard
    seen: list[Any] = []

    def hidden(module: nn.Module) -> Any:
        return theirs(module)

    with bind():
        model = two_blocks()
        hidden(model[0])
        seen.append(type(torch.distributed.fsdp.fully_shard.state(model[0])).__name__)
        with pytest.raises(ValueError, match="lowtide") as caught:
            torch.distributed.fsdp.fully_shard(model)
        seen.append(str(caught.value))
        hidden(two_blocks())(torch.ones(2, WIDTH)).sum().backward()
        model = two_blocks()
        torch.distributed.fsdp.fully_shard(model[0])
        seen.append(type(torch.distributed.fsdp.fully_shard.state(model[0])).__name__)
        hidden(model)
        with pytest.raises(AttributeError) as caught:
            model(torch.ones(2, WIDTH))
        seen.append(str(caught.value))
    return seen


def test_a_hidden_function_of_torch_still_works_alone(pool_of):
    kind, inside, ours, around = pool_of(1).run(hide_the_function)[0]
    assert (kind, ours) == ("FSDPState", "UnitState")
    assert "expected" in inside and "unit 'Block': expected an attribute" in around


def contexts() -> list[Any]:
    one, other = (sharded(get_system("lowtide")) for _ in range(2))
    ours = [model._get_fsdp_state() for model in (one, other)]
    found: list[Any] = [ours[0]._comm_ctx is ours[1]._comm_ctx]
    lowtide.share_comm_ctx([one, other])
    found.append(ours[0]._comm_ctx is ours[1]._comm_ctx)
    streams = {
        unit._get_fsdp_state()._comm_ctx.all_gather_stream for unit in units(one)
    }
    return [*found, len(streams), hasattr(streams.pop(), "wait_stream")]


def test_roots_have_contexts_of_their_own_and_streams_in_common(pool_of):
    assert pool_of(1).run(contexts) == [[False, True, 1, True]]


READS = {
    "_training_state": "unit 'Block'",
    "_comm_ctx.all_gather_state": "FSDPCommContext of unit 'Block'",
    "_fsdp_param_group.post_backward": "FSDPParamGroup of unit 'Block'",
    "_fsdp_param_group.fsdp_params.0._unsharded_param": "FSDPParam of Linear.weight",
}


def errors() -> list[str]:
    model = sharded(get_system("lowtide"))
    state = model[0]._get_fsdp_state()
    said = []
    for path in READS:
        value = state
        try:
            for name in path.split("."):
                value = value[int(name)] if name.isdigit() else getattr(value, name)
        except AttributeError as error:
            said.append(str(error))
    with pytest.raises(AttributeError, match="got _training_state = Training"):
        state._fsdp_param_group._training_state = TrainingState.FORWARD
    with pytest.raises(AttributeError, match="got '_training_state' of FSDP2's"):
        state._fsdp_param_group._training_state  # noqa: B018
    with pytest.raises(AttributeError) as caught:
        state._state_ctx.post_optim_event = torch.Event("cpu")
    return [*said, str(caught.value)]


def test_what_there_is_not_is_named(pool_of):
    *said, assigned = pool_of(1).run(errors)[0]
    end = " of FSDP2's private state. Use the methods of FSDPModule, or ask hasattr "
    end += "before."
    assert said == [
        f"lowtide: {who}: expected an attribute that it has here, too, got "
        f"{path.split('.')[-1]!r}{end}"
        for path, who in READS.items()
    ]
    assert "got an assignment to 'post_optim_event'" in assigned


def two_meshes() -> str:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    block = Block()

    def place(p: nn.Parameter) -> Any:
        placement = torch.distributed.tensor.Shard(0)
        of = mesh["a"] if p.ndim == 1 else mesh["b"]
        return lowtide.ShardPlacementResult(placement, of)

    lowtide.fully_shard(block, mesh=mesh["a"], shard_placement_fn=place)
    state: Any = block._get_fsdp_state()  # type: ignore[attr-defined]
    assert len(state._fsdp_param_groups) == 2
    with pytest.raises(AssertionError) as caught:
        state._fsdp_param_group  # noqa: B018
    return str(caught.value)


def test_one_group_of_a_module_with_two_is_refused(pool_of):
    (said,) = pool_of(1).run(two_meshes)
    assert "expected parameters on one mesh, got a module with 2. Read _fsdp_" in said
