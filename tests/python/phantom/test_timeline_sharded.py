"""Training steps on the timeline: collectives, streams and what they hide."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import lowtide.phantom
from llama import Llama, LlamaConfig
from lowtide._torch_version import VERSION
from lowtide.phantom import machines
from lowtide.phantom.dry.launch import Machine
from support.dry_process import call_dry
from support.systems import get_system

pytestmark = pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")

WORLD = 8
NUM_LAYERS = 3
# Blocks of 12.6 M parameters: their gradients leave lowtide's ring in pieces.
CONFIG = LlamaConfig(512, 1024, NUM_LAYERS, 8, 8, 2816, max_seq_len=512)


def steps_of_both() -> dict[str, Any]:
    dist.init_process_group("nccl")
    with torch.device("cuda"):
        replicated = DistributedDataParallel(Llama(CONFIG), broadcast_buffers=False)
    found: dict[str, Any] = {"ddp": third_step(replicated)}
    for system in ("fsdp2", "lowtide"):
        found[system] = step_time(system)
        found[f"{system} behind its optimizer"] = gathers_behind_an_optimizer(system)
        for how in ("event", "unshard"):
            found[f"{system} {how}"] = gathers_beside_what_follows(system, how)
    return found


def step_time(system_name: str) -> dict[str, Any]:
    """Embedding, blocks and the rest are units."""
    system = get_system(system_name)
    with torch.device("meta"):
        model = Llama(CONFIG)
    shard = partial(
        system.fully_shard,
        mp_policy=system.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    for unit in (model.tok_embeddings, *model.layers, model):
        shard(unit)
    model.to_empty(device="cuda")
    return third_step(model)


def third_step(model: torch.nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with lowtide.phantom.timeline("h100") as time:
        for _ in range(3):
            time.begin_step()
            time.phase("forward")
            tokens = torch.zeros(4, 513, dtype=torch.long, device="cuda")
            logits = model(tokens[:, :-1])
            time.phase("loss")
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            time.phase("backward")
            loss.backward()
            time.phase("optimizer")
            optimizer.step()
            optimizer.zero_grad()
    report = time.report().to_dict()
    begin = time._marks_of(-1)[0][1]
    spans = time.spans(begin)
    flops = sum(span.flops for span in spans)
    copies = sum(s.bytes for s in spans if s.kind == "kernel" and "copy" in s.name)
    return report | {"flops": flops, "copied": copies}


def small_model(system_name: str) -> tuple[Any, torch.Tensor]:
    """Two units and the root, and an input."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2))).to("cuda")
    for unit in (*model, model):
        get_system(system_name).fully_shard(unit)
    return model, torch.zeros(4, 8, device="cuda")


def gathers_behind_an_optimizer(system_name: str) -> tuple[float, float]:
    """The optimizer's kernels run on a stream of their own, most of a second, and
    the next step is told its event: when they end, and when its first gather begins."""
    model, x = small_model(system_name)
    other = torch.cuda.Stream()
    model(x).sum().backward()  # what runs only once
    large = torch.empty(1 << 35, device="meta", dtype=torch.uint8)
    with lowtide.phantom.timeline("h100") as time:
        with torch.cuda.stream(other):
            for _ in range(64):
                torch.empty_like(large, device="cuda").zero_()
            event = other.record_event()
        model.set_post_optim_event(event)
        model(x)
    spans = [span for span in time.spans() if span.kind != "wait"]
    done = max(span.end for span in spans if span.stream == other.cuda_stream)
    gathers = [span.begin for span in spans if span.kind == "collective"]
    return done, min(gathers)


def gathers_beside_what_follows(system_name: str, how: str) -> tuple[float, float]:
    """Kernels that have nothing to do with the model run between the optimizer and the
    next forward, most of a second: when they end, and when its first gather begins."""
    model, x = small_model(system_name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    large = torch.empty(1 << 35, dtype=torch.uint8, device="cuda")
    for _ in range(2):  # the first forward compares what ranks have sharded
        model(x).sum().backward()
        optimizer.step()
    with lowtide.phantom.timeline("h100") as time:
        optimizer.step()
        if how == "event":
            model.set_post_optim_event(torch.cuda.current_stream().record_event())
        else:
            model[0].unshard(async_op=True)
        for _ in range(64):
            large.zero_()
        model(x)
    spans = [span for span in time.spans() if span.kind != "wait"]
    # Torch may fill it piece by piece; all else is smaller.
    done = max(span.end for span in spans if span.bytes >= 1 << 20)
    gathers = [span.begin for span in spans if span.kind == "collective"]
    return done, min(gathers)


SLOW_CARDS = dataclasses.replace(machines.DGX, bandwidth_between_nodes=20e9)
# Links and ranks of a node: NVLink, a card of 20 GB/s for each GPU, PCIe.
LINKS = ((machines.DGX, 8), (SLOW_CARDS, 1), (machines.PCIE, 8))


class Experts(torch.nn.Module):
    """``flat``: the same products of a parameter of two dimensions."""

    def __init__(self, num: int = 8, *, flat: bool = False) -> None:
        super().__init__()
        self.shape = (num, 4096, 4096)
        shape = (num * 4096, 4096) if flat else self.shape
        self.weight = torch.nn.Parameter(torch.empty(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.weight.dim() == 2
        return torch.bmm(x, self.weight.view(self.shape) if flat else self.weight)


def dense() -> torch.nn.Module:
    return torch.nn.Linear(4096, 4096, bias=False)


# What a block has eight of, and its inputs but for their width: as many products.
LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "dense": (dense, (8192,)),
    "stacked experts": (partial(Experts, 2), (2, 4096)),
    "flat experts": (partial(Experts, 2, flat=True), (2, 4096)),
}


def calls_of_backwards(
    network: machines.Network, ranks_per_node: int, layers: str
) -> list[str]:
    """Of three steps: a for a gather and r for a reduction, as they run in
    backward."""
    torch.set_default_dtype(torch.bfloat16)
    make, inputs = LAYERS[layers]
    with torch.device("meta"):
        blocks = [torch.nn.Sequential(*(make() for _ in range(8))) for _ in range(3)]
    system = get_system("lowtide")
    model = torch.nn.Sequential(*blocks)
    for unit in (*blocks, model):
        system.fully_shard(unit)
    model.to_empty(device="cuda")
    with lowtide.phantom.timeline(
        "h100", network=network, ranks_per_node=ranks_per_node
    ) as time:
        for _ in range(3):
            time.begin_step()
            time.phase("forward")
            out = model(torch.zeros(*inputs, 4096, device="cuda"))
            time.phase("backward")
            out.sum().backward()
            model.zero_grad()
    found = []
    for step in range(3):
        _, (name, begin), (_, end) = time._marks_of(step)
        assert name == "backward"
        calls = [s for s in time.spans(begin, end) if s.kind == "collective"]
        calls.sort(key=lambda span: span.begin)
        found.append("".join("a" if "gather" in s.name else "r" for s in calls))
    dist.destroy_process_group()
    return found


def calls_by_links(layers: str) -> list[list[str]]:
    found = []
    for network, ranks_per_node in LINKS:
        dist.init_process_group("nccl")
        found.append(calls_of_backwards(network, ranks_per_node, layers))
    return found


def gathers_before_a_reduction(layers: str) -> list[list[int]]:
    """Of each step, by links."""
    by_links = call_dry(calls_by_links, layers, machine=Machine(world=WORLD))
    assert len({steps[2].count("a") for steps in by_links}) == 1
    return [[calls.index("r") for calls in steps] for steps in by_links]


def test_gathers_in_backward_leave_at_once_where_the_first_ones_took_long():
    """Over NVLink the next unit's gather leaves behind the first gradients; over links
    that turn out to be slow, from the second step on, before them."""
    assert gathers_before_a_reduction("dense") == [[1, 1, 1], [1, 2, 2], [1, 2, 2]]


def test_gathers_of_experts_leave_at_once_over_any_links():
    """From the first step on: how many tokens an expert gets nobody knows, so its
    gradients are taken to hide nothing."""
    assert gathers_before_a_reduction("stacked experts") == [[2, 2, 2]] * len(LINKS)
    # Of two dimensions they are taken for used by every token.
    flat = gathers_before_a_reduction("flat experts")
    assert flat == [[1, 1, 1], [1, 2, 2], [1, 2, 2]]


def reductions_of_experts() -> list[tuple[float, float]]:
    """When the reductions of a unit begin and end, whose one gradient comes at once
    and leaves in chunks."""
    dist.init_process_group("nccl")
    system = get_system("lowtide")
    with torch.device("meta"):
        model = torch.nn.Sequential(Experts(), torch.nn.Linear(4096, 8))
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in (*model, model):
        system.fully_shard(unit, mp_policy=policy)
    model.to_empty(device="cuda")
    with lowtide.phantom.timeline("h100") as time:
        for _ in range(3):
            time.begin_step()
            time.phase("step")
            model(torch.zeros(8, 64, 4096, device="cuda")).sum().backward()
            model.zero_grad()
    (_, begin), (_, end) = time._marks_of(-1)
    collectives = [s for s in time.spans(begin, end) if s.kind == "collective"]
    reductions = [s for s in collectives if "gather" not in s.name]
    longest = max(span.bytes for span in reductions)
    return sorted((s.begin, s.end) for s in reductions if s.bytes > longest / 2)


def test_a_chunk_is_written_while_the_one_before_is_on_its_way():
    reductions = call_dry(reductions_of_experts, machine=Machine(world=WORLD))
    assert len(reductions) >= 4
    gaps = [
        begin - end
        for (_, end), (begin, _) in zip(reductions, reductions[1:], strict=False)
    ]
    assert max(gaps) < 5e-6, gaps


@pytest.fixture(scope="module")
def steps():
    return call_dry(steps_of_both, machine=Machine(world=WORLD))


def parameters() -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Llama(CONFIG).parameters())


def embedding() -> int:
    return CONFIG.vocab_size * CONFIG.dim


def block() -> int:
    with torch.device("meta"):
        model = Llama(CONFIG)
    return sum(p.numel() for p in model.layers[0].parameters())


def test_fsdp2_gathers_and_reduces_each_unit_once_a_pass(steps):
    fsdp2 = steps["fsdp2"]
    # Forward: root, embedding, blocks; backward: all but the root.
    assert fsdp2["collectives"] == {
        "all-gather": 2 + NUM_LAYERS + 1 + NUM_LAYERS,
        "reduce-scatter": 2 + NUM_LAYERS,
    }
    regathered = embedding() + NUM_LAYERS * block()
    assert fsdp2["collective_bytes"]["all-gather"] == 2 * (parameters() + regathered)
    assert fsdp2["collective_bytes"]["reduce-scatter"] == 4 * parameters()


def test_lowtide_gathers_once_less_and_reduces_in_chunks(steps):
    ours = steps["lowtide"]
    # The embedding's parameters are not read in backward.
    assert ours["collectives"]["all-gather"] == 2 + NUM_LAYERS + NUM_LAYERS
    regathered = NUM_LAYERS * block()
    assert ours["collective_bytes"]["all-gather"] == 2 * (parameters() + regathered)
    padding = ours["collective_bytes"]["reduce-scatter"] / (4 * parameters())
    assert 1 <= padding < 1.001


def test_ddp_reduces_its_buckets_beside_backward(steps):
    ddp = steps["ddp"]
    assert set(ddp["collectives"]) == {"all-reduce"}
    # Its buckets, of 25 MB, hold gradients in fp32; the first is of 1 MB.
    assert ddp["collective_bytes"]["all-reduce"] == 4 * parameters()
    assert ddp["collectives"]["all-reduce"] > 4 * parameters() // (50 << 20)
    # What the last bucket takes is behind backward.
    backward, step = ddp["phases"]["backward"], ddp["step"]
    assert backward["communication"] == step["communication"] > 0
    if VERSION < (2, 15):
        assert 0 < step["exposed"] < step["communication"]
    else:  # nccl2 makes the stream wait where DDP asks for the future of a bucket
        assert step["exposed"] == pytest.approx(step["communication"])


def test_phases_follow_each_other_and_add_up(steps):
    for system in ("ddp", "fsdp2", "lowtide"):
        found = steps[system]
        assert list(found["phases"]) == ["forward", "loss", "backward", "optimizer"]
        total = sum(phase["seconds"] for phase in found["phases"].values())
        assert found["step"]["seconds"] == pytest.approx(total)
        for usage in (*found["phases"].values(), found["step"]):
            parts = ("compute", "exposed", "other_waits", "idle")
            assert usage["seconds"] == pytest.approx(sum(usage[p] for p in parts))
            assert usage["exposed"] <= usage["communication"] + 1e-12


def test_both_systems_compute_the_same_products(steps):
    assert steps["lowtide"]["flops"] == steps["fsdp2"]["flops"] > 0
    # FSDP2 copies what it gathered.
    assert steps["lowtide"]["copied"] < steps["fsdp2"]["copied"]


@pytest.mark.parametrize("system", ["fsdp2", "lowtide"])
def test_gathers_wait_for_the_optimizers_event(steps, system):
    done, gather = steps[f"{system} behind its optimizer"]
    assert 0.5 < done <= gather


def test_a_gather_that_is_asked_for_overlaps_what_follows_the_optimizer(steps):
    """FSDP2's also with the event; lowtide's goes behind all that its memory is of."""
    begins_early = {}
    for key in [key for key in steps if key.endswith(("event", "unshard"))]:
        done, gather = steps[key]
        begins_early[key] = gather < done - 0.5
    assert begins_early == {
        "fsdp2 event": True,
        "fsdp2 unshard": True,
        "lowtide event": False,
        "lowtide unshard": True,
    }
