"""One `fully_shard` call whose parameters are on several meshes, as FSDP2 has it from
torch 2.12 on: a block's experts over the ranks that have the same ones, the rest of it
over all ranks.

FSDP2 runs the same call where torch has `ShardPlacementResult`; before, the experts of
its blocks are units of their own over the same mesh: units in units, which are cases of
both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._torch_version import VERSION
from lowtide.stepping import StepUndone
from support import titan_on_cpus
from support.bits import assert_same_tensors
from support.bombs import Boom
from support.recorder import Record, Recorder, assert_trains_as_fsdp2, finish_step
from support.systems import System, get_system
from support.training import adamw

RANKS, GROUPS = 4, 2  # experts are split into groups, over which tokens are exchanged
WIDTH, HIDDEN, EXPERTS, TOKENS = 8, 12, 2, 6  # experts and tokens of a rank
STEPS, BLOCKS = 3, 3
ONE_CALL = VERSION >= (2, 12)  # FSDP2's


@dataclass(frozen=True)
class Case:
    microbatches: int = 1
    synced: Callable[[int], bool] = lambda microbatch: True
    replicas: bool = False  # dense parameters have some, and all experts do
    columns: bool = False  # experts are split along their second dimension
    # Experts are parameters of their own, and lowtide's idle where no token is theirs;
    # FSDP2 before torch 2.13 wants ranks to use the same ones.
    separate: bool = False
    checkpointed: bool = False  # blocks are, lowtide's by a policy
    compiled: bool = False
    whole: bool = False  # one call for the model
    nested: bool = False  # experts of a block by a call of their own
    low: bool = False
    factor: float | None = None
    reshard: bool | int | None = None
    keeps: bool = False  # parameters, after backward
    parallel: bool = False  # experts are DTensor over their groups, and clipped
    # A dense layer is tensor-parallel; nothing is clipped.
    tensor: bool = False


CASES = {
    "every backward": Case(microbatches=2),
    "without sync": Case(microbatches=3, synced=lambda microbatch: microbatch == 2),
    "gradients as of all ranks": Case(factor=4.0, low=True, microbatches=2),
    "kept": Case(reshard=False, keeps=True, microbatches=2),
    "kept in part": Case(reshard=2, low=True),
    "replicas": Case(replicas=True, low=True, microbatches=2),
    "columns": Case(columns=True, microbatches=2, synced=lambda m: m == 1),
    "checkpointed": Case(checkpointed=True, low=True),
    "idle experts": Case(separate=True, microbatches=2),
    "compiled": Case(compiled=True),
    "clipped": Case(parallel=True, microbatches=2),
    "tensor parallel": Case(tensor=True, microbatches=2),
    "tensor and expert parallel": Case(
        tensor=True,
        parallel=True,
        low=True,
        microbatches=2,
        synced=lambda microbatch: microbatch == 1,
    ),
    "one call": Case(whole=True, microbatches=2, low=True),
    "nested": Case(nested=True, microbatches=2),
    "nested, without sync": Case(
        nested=True,
        separate=True,
        checkpointed=True,
        low=True,
        microbatches=3,
        synced=lambda microbatch: microbatch == 2,
    ),
    "nested, replicas": Case(nested=True, replicas=True, separate=True, microbatches=2),
    "nested, kept": Case(nested=True, reshard=False, keeps=True, microbatches=2),
    "nested, columns": Case(nested=True, columns=True, checkpointed=True, factor=4.0),
    "nested, compiled": Case(nested=True, compiled=True),
    "nested, clipped": Case(nested=True, parallel=True, microbatches=2),
}


class Experts(nn.Module):
    """Those of this rank's group; others' are a hop away."""

    def __init__(self, mesh: DeviceMesh, case: Case) -> None:
        super().__init__()
        self.group, self.place = mesh.get_group(), mesh.get_local_rank()
        generator = torch.Generator().manual_seed(7 + self.place)
        up = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator) / 3
        down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) / 3
        self.idles = False
        if case.parallel:
            up, down = (
                DTensor.from_local(one, mesh, [Shard(0)], run_check=False)
                for one in (up, down)
            )
        if case.separate:
            self.up, self.down = (
                nn.ParameterList(one.clone() for one in stacked)
                for stacked in (up, down)
            )
        else:
            self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """``chosen``: the number of each token's expert, among all groups'."""
        groups = torch.arange(GROUPS).view(-1, 1, 1)
        sent = torch.where(chosen.view(1, -1, 1) // EXPERTS == groups, x, 0)
        came, for_me = torch.empty_like(sent), torch.empty(GROUPS, *chosen.shape)
        came = dist_nn.all_to_all_single(came, sent, group=self.group)
        asked = chosen.to(for_me.dtype).expand_as(for_me).contiguous()
        dist.all_to_all_single(for_me, asked, group=self.group)
        local = for_me.long() - EXPERTS * self.place
        up, down = (
            one.to_local() if isinstance(one, DTensor) else one
            for one in (self.up, self.down)
        )
        out = torch.zeros_like(came)
        for number in range(EXPERTS):
            mine = (local == number).unsqueeze(-1)
            if self.idles and not mine.any():
                continue
            hidden = torch.tanh(came @ up[number])
            out = out + torch.where(mine, hidden @ down[number], 0)
        back = dist_nn.all_to_all_single(
            torch.empty_like(out), out.contiguous(), group=self.group
        )
        return back.sum(0)


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh, case: Case) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(mesh, case)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return x + self.norm(self.experts(torch.tanh(self.mix(x)), chosen))


class Net(nn.Module):
    def __init__(self, mesh: DeviceMesh, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block(mesh, case) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.checkpointed = False

    def forward(self, ids: Tensor, chosen: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, chosen, use_reentrant=False)
            else:
                x = block(x, chosen)
        return self.head(x)


def meshes(case: Case) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Of dense parameters and of experts, and that over which these are split."""
    dense = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    both = init_device_mesh(
        "cpu", (RANKS // GROUPS, GROUPS), mesh_dim_names=("edp", "ep")
    )
    experts = both["edp"]
    if case.replicas:
        dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        shape = (RANKS // GROUPS, 1, GROUPS)
        names = ("expert_replicas", "expert_shards", "ep")
        both = init_device_mesh("cpu", shape, mesh_dim_names=names)
        experts = both["expert_replicas", "expert_shards"]
    return dense, experts, both["ep"]


def tensor_parallel(model: Any) -> DeviceMesh:
    """The mesh that is left for dense parameters."""
    both = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"mix": ColwiseParallel(output_layouts=Replicate())}
    for block in model.blocks:
        parallelize_module(block, both["tp"], plan)
    return both["dp"]


def sharded(system: System, case: Case) -> Any:
    dense, of_experts, of_groups = meshes(case)
    model: Any = Net(of_groups, case)
    if case.tensor:
        dense = tensor_parallel(model)
    experts = {p for block in model.blocks for p in block.experts.parameters()}
    split = Shard(1) if case.columns else None
    result = lowtide.ShardPlacementResult(
        split,
        HSDPMeshInfo(of_experts, shard_mesh_dim=1, replicate_mesh_dim=0)
        if case.replicas
        else FSDPMeshInfo(of_experts, shard_mesh_dim=0),
    )
    settings: dict[str, Any] = {"mesh": dense, "reshard_after_forward": case.reshard}
    if case.low:
        settings["mp_policy"] = system.MixedPrecisionPolicy(
            torch.bfloat16, torch.float32
        )
    one_call = (ONE_CALL or system.name == "lowtide") and not case.nested

    def place(parameter: nn.Parameter) -> Any:
        return result if one_call and parameter in experts else None

    def shard_experts_of(block: Any) -> None:
        if not one_call:
            after = True if case.reshard == 2 else case.reshard
            system.fully_shard(
                block.experts,
                **settings | {"mesh": of_experts, "reshard_after_forward": after},
                shard_placement_fn=lambda parameter: split,
            )

    for block in model.blocks:
        if case.checkpointed and system.name == "lowtide" and not case.nested:
            lowtide.checkpoint(block, lowtide.ActivationPolicy(offload=("mix",)))
        if case.compiled:
            block.compile(backend="aot_eager")
        shard_experts_of(block)
        if not case.whole:
            system.fully_shard(block, **settings, shard_placement_fn=place)
    system.fully_shard(model, **settings, shard_placement_fn=place)
    system.prepare(model)
    for module in model.modules():
        if isinstance(module, system.FSDPModule):
            module.set_force_sum_reduction_for_comms(case.factor is not None)
            if case.factor is not None:
                module.set_gradient_divide_factor(case.factor)
    model.checkpointed = case.checkpointed and (case.nested or system.name != "lowtide")
    if case.separate and system.name == "lowtide":
        model.set_reduce_scatter_unused_params(True)
        for block in model.blocks:
            block.experts.idles = True
    return model


def batches(
    step: int, count: int, case: Case | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids, experts and targets; ranks and steps choose other experts. Ranks of one
    tensor-parallel group have the same."""
    rank = dist.get_rank()
    if case is not None and case.tensor:
        rank //= 2
    for microbatch in range(count):
        seed = 100 * step + 10 * microbatch + rank
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 11, (TOKENS,), generator=generator)
        chosen = torch.randint(0, GROUPS * EXPERTS, (TOKENS,), generator=generator)
        if (step + rank) % 2:
            chosen = chosen // 2 * 2  # the others of each group are not asked
        yield ids, chosen, torch.randint(0, 5, (TOKENS,), generator=generator)


def clip(system_name: str) -> Callable[[Iterator[nn.Parameter]], Tensor]:
    """With FSDP2 torchtitan's, as torch's takes no gradients of several meshes."""
    if system_name == "lowtide":
        return functools.partial(lowtide.clip_grad_norm_, max_norm=0.5)
    titan_on_cpus.prepare()
    from torchtitan.distributed.utils import clip_grad_norm_

    return functools.partial(clip_grad_norm_, max_norm=0.5, ep_enabled=True)


def train(system_name: str, name: str) -> Record:
    case = CASES[name]
    model = sharded(get_system(system_name), case)
    optimizer = adamw(model, foreach=False)
    record = Recorder()
    for step in range(STEPS):
        steps = batches(step, case.microbatches, case)
        for microbatch, (ids, chosen, targets) in enumerate(steps):
            model.set_requires_gradient_sync(case.synced(microbatch))
            last = microbatch == case.microbatches - 1
            model.set_reshard_after_backward(last or not case.keeps)
            logits = model(ids, chosen)
            loss = nn.functional.cross_entropy(logits, targets)
            record.add("loss", loss)
            loss.backward()
        if case.parallel and not case.tensor:
            record.add("norm", clip(system_name)(model.parameters()))
        finish_step(model, optimizer, record)
    return record.values


QUICK = (
    "gradients as of all ranks",
    "replicas",
    "clipped",
    "tensor and expert parallel",
    "nested, without sync",
    "nested, replicas",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES],
)
def test_training_equals_fsdp2(pool_of, case):
    assert_trains_as_fsdp2(pool_of(RANKS), train, case)


class Trained:
    """A model after a step, and its optimizer."""

    def __init__(
        self, case: Case, optimizer: Callable[..., Any] = adamw, clips: bool = True
    ) -> None:
        self.clips = clips
        self.model = sharded(get_system("lowtide"), case)
        self.optimizer = optimizer(self.model)
        self.step(0)

    def step(self, number: int) -> None:
        for ids, chosen, targets in batches(number, 1):
            logits = self.model(ids, chosen)
            nn.functional.cross_entropy(logits, targets).backward()
        if self.clips:
            lowtide.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.model.zero_grad()

    def values(self) -> dict[str, Tensor | None]:
        """Whole parameters, and what the optimizer has of each; collective."""
        found: dict[str, Tensor | None] = {}
        for name, p in self.model.named_parameters():
            found[name] = p.full_tensor()
            for key, value in self.optimizer.state.get(p, {}).items():
                whole = isinstance(value, DTensor)
                found[f"{name}.{key}"] = value.full_tensor() if whole else value
        return dict(sorted(found.items()))


def manage(folder: str) -> None:
    trained = Trained(Case(parallel=True))
    model, optimizer = trained.model, trained.optimizer
    expected = trained.values()

    def same(what: str, other: Trained = trained) -> None:
        assert_same_tensors(other.values(), expected, what)

    def fail() -> None:
        with lowtide.step(model, optimizer):
            trained.step(1)
            if dist.get_rank() == 1:
                raise Boom("of one rank")

    with pytest.raises((Boom, StepUndone)):
        fail()
    same("an undone step")

    lowtide.sleep(model, optimizer)
    with pytest.raises(RuntimeError, match="expected parameters that are awake"):
        trained.step(1)
    lowtide.wake(model, optimizer)
    same("sleep")

    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    same("to_empty and load_state_dict")

    lowtide.save(folder, model, optimizer)
    other = Trained(Case(parallel=True, replicas=True))
    lowtide.load(folder, other.model, other.optimizer)
    same("a checkpoint, over other meshes", other)

    block = model.blocks[1]
    block.unshard(async_op=True).wait()
    assert not any(isinstance(p, DTensor) for p in block.mix.parameters())
    assert block.experts.up.device_mesh.ndim == 1  # whole, of this rank's group
    block.reshard()
    assert block.experts.up.device_mesh.ndim == 2
    model.blocks[0].set_modules_to_forward_prefetch([block])
    block.set_modules_to_backward_prefetch([model.blocks[0]])
    trained.step(1)
    other.step(1)
    units = lowtide.memory_report(model).units
    assert {"blocks.1", "blocks.1 over 2 edp"} <= set(units)
    for method in ("custom_all_gather", "custom_reduce_scatter", "all_reduce_hook"):
        with pytest.raises(ValueError, match="expected a module whose parameters are"):
            getattr(block, f"set_{method}")(None)


def test_everything_else_takes_all_units_of_a_call(pool_of, tmp_path):
    pool_of(RANKS).run(manage, str(tmp_path / "saved"))


def other_optimizers() -> None:
    def behind(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def of_rows(model: Any) -> Any:
        return torch.optim.SGD(lowtide.local_parameters(model), lr=0.1)

    def early(model: Any) -> Any:
        return lowtide.optimize_in_backward(
            model, torch.optim.SGD, lr=0.1, max_norm=0.5
        )

    case = Case(parallel=True)
    expected = Trained(case, behind).values()
    assert_same_tensors(Trained(case, of_rows).values(), expected, "local parameters")
    others = Trained(case, early, clips=False).values()
    for name, value in expected.items():
        # Norms of two meshes are combined in another order of operations.
        torch.testing.assert_close(others[name], value)
    # Experts that only their rank knows of have norms of their own.
    for optimizer, clips in ((behind, True), (early, False)):
        with pytest.raises(ValueError, match="expected one norm of all gradients"):
            Trained(Case(), optimizer, clips)


def test_other_optimizers_step_all_units_of_a_call(pool_of):
    pool_of(RANKS).run(other_optimizers)


def train_with_one_of_one_rank(system_name: str) -> Record:
    """A linear layer, whose weight backward gathers since autograd has saved it."""
    system = get_system(system_name)
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "this"))["this"]
    for layer, mesh in zip(model, (None, alone, None), strict=True):
        system.fully_shard(layer, mesh=mesh)
    system.fully_shard(model)
    optimizer, record = adamw(model), Recorder()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        model(torch.randn(4, 8, generator=generator)).pow(2).mean().backward()
        finish_step(model, optimizer, record)
    return record.values


def test_a_unit_of_one_rank_trains_beside_those_of_more(pool_of):
    assert_trains_as_fsdp2(pool_of(2), train_with_one_of_one_rank)
