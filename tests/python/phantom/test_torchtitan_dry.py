"""torchtitan 0.3 and later over the driver that computes nothing: what gloo does
not have. Experts over ranks, context parallelism, and forward and backward in a CUDA
graph, its default."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from lowtide._torch_version import STORES_ANNOTATED, VERSION
from lowtide.phantom.dry import driver, launch
from support import titan_on_cpus
from support.dry_process import call_dry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch"),
    pytest.mark.skipif(not titan_on_cpus.HAS_CONFIGS, reason="an older torchtitan"),
    pytest.mark.skipif(
        VERSION < (2, 14),
        reason="its trainer sets timeouts by a function of torch 2.14",
    ),
]
STEPS = 4
WORLD = 8
HEAD_BYTES = 2048 * 256 * 4  # of the debug model's gradient
NORM_BYTES = 256 * 4
# By the ranks of the group, kind and reduction: how many calls there are, and bytes.
Sent = dict[tuple[tuple[int, ...], str, str], list[int]]


def sent(calls: Sequence[driver.Call]) -> Sent:
    ranks = {each.number: each.ranks for each in driver.communicators()}
    found: Sent = defaultdict(lambda: [0, 0])
    for call in calls:
        of = found[ranks[call.communicator], call.kind, call.reduction]
        of[0] += 1
        of[1] += call.bytes
    return dict(found)


def train(system: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What the last step asks of NCCL, bytes that all steps reduce, addresses of
    gradients after each step, reserved bytes, and how many parameters stepped as one
    with others."""
    from lowtide._sharding import neighbours
    from lowtide.integrations.torchtitan import parallelize_fn

    titan_on_cpus.stand_in_for_absent()
    # torchao 0.18's kernels are refused by the triton of torch 2.15 where there is a
    # GPU; torchtitan goes on without them.
    sys.modules["torchao.prototype.moe_training"] = None  # type: ignore[assignment]
    from support import titan_configs

    if settings.get("flex"):
        # It sends nothing: its kernels need no tuning.
        from torchtitan.models.common.attention import FlexAttention

        compiled = torch.compile(flex_attention, backend="aot_eager")
        FlexAttention._compiled_flex_attn = compiled
    change = parallelize_fn if system == "lowtide" else lambda theirs: theirs
    trainer = titan_configs.trainer_of(change, folder, STEPS, saves=False, **settings)
    gradients: list[list[int]] = []
    ends: list[int] = []
    (model,) = trainer.model_parts

    def note_gradients(*_: Any) -> None:
        ends.append(driver.num_calls())
        gradients.append([p.grad._local_tensor.data_ptr() for p in model.parameters()])

    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(note_gradients)
    as_one: list[int] = []
    whole = neighbours.Run.whole

    def counted(run: neighbours.Run, states: Any) -> Any:
        found = whole(run, states)
        as_one.append(len(run.parameters) if found is not None else 0)
        return found

    neighbours.Run.whole = counted  # type: ignore[method-assign]
    trainer.train()
    torch.cuda.synchronize()
    reserved = torch.cuda.max_memory_reserved()
    placements = {n: str(p.placements) for n, p in model.named_parameters()}
    trainer.close()
    return {
        "placements": placements,
        "sent": sent(driver.calls()[ends[-2] : ends[-1]]),
        "reduced": sum(c.bytes for c in driver.calls() if c.kind == "reduce_scatter"),
        "gradients": gradients,
        "reserved": reserved,
        "parameters": len(placements),
        "as one": sum(as_one) / STEPS,
    }


def test_forward_and_backward_in_a_graph(tmp_path):
    """They are captured after an eager step, and what is replayed writes the gradients
    that it wrote then. Nothing of layers is reduced behind a chunk of the loss; norm
    and head, one unit, leave whole with either's gradients."""
    machine = launch.Machine(world=WORLD)
    theirs, ours = (
        call_dry(train, system, tmp_path, {"graphs": True}, machine=machine)
        for system in ("fsdp2", "lowtide")
    )
    for run in (theirs, ours):
        assert len(run["gradients"]) == STEPS
        assert run["gradients"][1:] == [run["gradients"][1]] * (STEPS - 1)
    theirs_and_a_head = theirs["reduced"] + 2 * HEAD_BYTES
    assert theirs["reduced"] <= ours["reduced"] < 1.01 * theirs_and_a_head
    assert ours["reserved"] <= theirs["reserved"]


@pytest.mark.parametrize("graphs", [False, True])
def test_units_step_as_one_in_the_segments_of_its_launcher(tmp_path, graphs):
    """`run_train.sh` sets them."""
    settings = {"graphs": graphs}
    theirs, ours = (
        call_dry(
            *(train, system, tmp_path, settings),
            machine=launch.Machine(world=WORLD),
            environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        )
        for system in ("fsdp2", "lowtide")
    )
    assert ours["as one"] >= 0.7 * ours["parameters"]
    assert ours["reserved"] <= theirs["reserved"]


def compare(
    folder: Path,
    dense: tuple[int, ...],
    of_an_expert: tuple[int, ...] | None = None,
    world: int = WORLD,
    **settings: Any,
) -> dict[str, Any]:
    """lowtide's run, in which each group carries what it carries with FSDP2.

    FSDP2 gathers norm and head once more, between the model's forward and the loss, and
    the embedding's table in backward, too, which lowtide does where torchtitan has
    replaced its forward; lowtide reduces norm and head once more, behind the chunks,
    and pads what each rank gets of a reduction to 512 bytes. Over one rank FSDP2 issues
    nothing.
    """
    theirs, ours = (
        call_dry(
            *(train, system, folder, settings), machine=launch.Machine(world=world)
        )
        for system in ("fsdp2", "lowtide")
    )
    sent = {of: what for of, what in ours["sent"].items() if len(of[0]) > 1}
    assert sent.keys() == theirs["sent"].keys()
    head = HEAD_BYTES // settings.get("tensor_parallel_degree", 1) + NORM_BYTES
    default = "spmd_types" if STORES_ANNOTATED else "partial_dtensor"
    replaced = settings.get("spmd_backend", default) == "spmd_types" or any(
        settings.get(f"{kind}_parallel_degree", 1) > 1 for kind in ("tensor", "expert")
    )
    table = 0 if replaced else HEAD_BYTES
    for of, (count, num_bytes) in sent.items():
        ranks, kind, _ = of
        expected = theirs["sent"][of][1]
        if kind == "all_gather" and ranks in (dense, of_an_expert):
            less = (head + table) // 2 // len(ranks) if ranks == dense else 0  # in bf16
            assert num_bytes == expected - less, of
        elif kind == "reduce_scatter" and ranks in (dense, of_an_expert):
            padding = num_bytes - expected - (head if ranks == dense else 0)
            assert 0 <= padding <= 512 * len(ranks) * count, of
        else:
            assert [count, num_bytes] == theirs["sent"][of], of
    assert ours["placements"] == theirs["placements"]
    assert ours["reserved"] <= theirs["reserved"]
    return ours


EVERYONE = tuple(range(WORLD))
# Settings, the ranks that share an expert, those that share the rest.
WITH_EXPERTS: dict[str, tuple[dict[str, int], tuple[int, ...], tuple[int, ...]]] = {
    "over four ranks": ({"expert_parallel_degree": 4}, (0, 4), EVERYONE),
    "of each rank": ({"expert_parallel_degree": 8}, (0,), EVERYONE),
    "beside tensor parallelism": (
        {"expert_parallel_degree": 2, "tensor_parallel_degree": 2},
        *((0, 2, 4, 6), (0, 2, 4, 6)),
    ),
    # On more ranks than the head.
    "beside more tensor parallelism": (
        {"expert_parallel_degree": 2, "tensor_parallel_degree": 4},
        *((0, 2, 4, 6), (0, 4)),
    ),
}


@pytest.mark.parametrize("case", WITH_EXPERTS)
def test_experts_over_ranks(tmp_path, case):
    settings, of_an_expert, dense = WITH_EXPERTS[case]
    ours = compare(tmp_path, dense, of_an_expert, model="deepseek_v3", **settings)
    experts = settings["expert_parallel_degree"]
    columns = settings.get("tensor_parallel_degree", experts)
    of_tokens, of_columns = tuple(range(experts)), tuple(range(columns))
    groups = {dense, of_tokens, of_columns, of_an_expert}
    assert {of[0] for of in ours["sent"]} == groups
    assert ours["sent"][of_tokens, "send", "-"][0] > 0


@pytest.mark.parametrize("expert_parallel", [1, 4])
def test_experts_fewer_than_ranks(tmp_path, expert_parallel):
    """Eight, which are sharded by columns then, over the ranks that share them."""
    world = 2 * WORLD
    everyone = tuple(range(world))
    of_an_expert = everyone[::expert_parallel]
    ours = compare(
        *(tmp_path, everyone, of_an_expert, world),
        **{"model": "deepseek_v3", "expert_parallel_degree": expert_parallel},
    )
    by_columns = {n for n, how in ours["placements"].items() if "Shard(dim=1)" in how}
    of_experts = {n for n in ours["placements"] if ".inner_experts." in n}
    assert by_columns == of_experts != set()
    assert ours["sent"][of_an_expert, "reduce_scatter", "sum"][0] > 0


# Attention as its authors have it, compiled, and as on CPUs.
WITH_CONTEXT: dict[str, dict[str, Any]] = {
    "flex": {"flex": True, "context_parallel_load_balancer": "ptrr", "seq_len": 256},
    "sdpa": {"spmd_backend": "partial_dtensor"},
}


@pytest.mark.parametrize("attention", WITH_CONTEXT)
def test_context_parallel(tmp_path, attention):
    settings = WITH_CONTEXT[attention]
    ours = compare(tmp_path, EVERYONE, context_parallel_degree=2, **settings)
    kind = "reduce_scatter" if attention == "flex" else "send"  # in backward
    assert any(ours["sent"].get(((0, 1), kind, how)) for how in ("-", "sum"))
