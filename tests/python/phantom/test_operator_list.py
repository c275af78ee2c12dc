"""Every operator of a training step was reviewed: what it allocates on CUDA is what it
allocates here. Meta mode refuses the others, so that no figure is a guess."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from llama import CONFIGS, Llama
from support.phantom import PhantomOf
from support.systems import get_system

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

OPTIMIZERS = {
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
    "foreach AdamW": partial(torch.optim.AdamW, foreach=True),
    "AdamW": partial(torch.optim.AdamW, foreach=False),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
SYSTEMS = ("unsharded", "fsdp2", "lowtide")


class Recorder(TorchDispatchMode):
    """Operators as autograd hands them to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ):
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            place = value.device if isinstance(value, torch.Tensor) else value
            if isinstance(place, torch.device) and place.type == "phantom":
                self.seen.add((op._schema.name, op._schema.overload_name))
        return op(*args, **kwargs)


def train(system_name: str, optimizer_name: str) -> None:
    import lowtide.phantom

    with torch.device("meta"):
        model = Llama(CONFIGS["tiny"])
    if system_name != "unsharded":
        lowtide.phantom.init_world(8)
        mesh = init_device_mesh("phantom", (8,))
        system = get_system(system_name)
        policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for unit in (*model.layers, model):
            system.fully_shard(unit, mesh=mesh, mp_policy=policy)
    for layer in model.layers:
        checkpoint_in_place(layer)
    model.to_empty(device="phantom")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for step in range(2):
        if system_name != "unsharded":
            model.set_requires_gradient_sync(step == 1)
        tokens = torch.randint(256, (2, 65)).to("phantom")
        logits = F.dropout(model(tokens[:, :-1]), 0.1).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == 1  # what meta mode reads
    if dist.is_initialized():
        dist.destroy_process_group()


def checkpoint_in_place(layer: torch.nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


def operators_of(system: str, optimizer: str) -> dict[str, str | None]:
    from lowtide import _phantom

    with Recorder() as recorder:
        train(system, optimizer)
    return {
        f"{name}.{overload}": _phantom.operator_memory(name, overload)
        for name, overload in recorder.seen
        if name.startswith("aten::")
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("system", ["unsharded", "fsdp2"])
def test_every_operator_of_a_step_is_on_the_list(phantom: PhantomOf, system, optimizer):
    memory = phantom("meta").run(operators_of, system, optimizer)
    assert len(memory) > 40
    assert [name for name, found in memory.items() if found is None] == []


def test_every_operator_of_lowtides_step_is_on_the_list(phantom: PhantomOf):
    memory = phantom("meta").run(operators_of, "lowtide", "fused AdamW")
    assert len(memory) > 40
    assert [name for name, found in memory.items() if found is None] == []


def composed_here_alone(system: str, optimizer: str) -> list[str]:
    """Operators of a step that torch composes of others on this device, has a kernel
    for on CUDA, and that were not reviewed as allocating the same."""
    found = []
    for name, memory in operators_of(system, optimizer).items():
        name = name.removesuffix(".")
        composed = not has_kernel(name, "PrivateUse1") and (
            has_kernel(name, "CompositeImplicitAutograd")
            or has_kernel(name, "CompositeExplicitAutograd")
        )
        if composed and has_kernel(name, "CUDA") and memory != "parts":
            found.append(name)
    return found


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_cuda_fuses_is_not_composed(phantom: PhantomOf, system):
    process = phantom("meta")
    assert process.run(composed_here_alone, system, "foreach AdamW") == []


def unknown_names() -> list[str]:
    from lowtide import _phantom

    names = {
        name.split(".")[0].removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    listed = _phantom.listed_operators()
    assert len(listed) > 200
    return [n for n in listed if n not in names and f"{n}_" not in names]


def test_the_list_names_operators_that_exist(phantom: PhantomOf):
    assert phantom("meta").run(unknown_names) == []


def refusals() -> list[str]:
    x = torch.ones(4, 4, device="phantom")
    texts = []
    for action in (
        lambda: torch.topk(x, 2),
        lambda: torch.nonzero(x),
        lambda: x[x > 0],
        lambda: torch.fft.fft(x),
    ):
        with pytest.raises(RuntimeError) as raised:
            action()
        texts.append(str(raised.value))
    return texts


def test_meta_mode_refuses_what_it_does_not_know(phantom: PhantomOf):
    unlisted = (
        "expected one whose memory on CUDA is known, got one that is not on the list. "
        "Pass allow=['aten::{0}'], or --allow aten::{0} to `lowtide plan`, to count "
        "its outputs alone."
    )
    by_value = (
        "lowtide: phantom: operator aten::nonzero: expected a result that follows from "
        "the arguments' shapes, got one that depends on their values, which meta mode "
        "does not have. Use install(mode='exact'), or compute it on the CPU."
    )
    assert phantom("meta").run(refusals) == [
        "lowtide: phantom: operator aten::topk.values: " + unlisted.format("topk"),
        by_value,
        by_value,
        "lowtide: phantom: operator aten::_fft_r2c: " + unlisted.format("_fft_r2c"),
    ]


def allowed() -> tuple[str | None, list[int], int]:
    from lowtide import _phantom

    x = torch.empty(64, 64, device="phantom")
    before = torch.accelerator.memory_allocated()
    values, indices = torch.topk(x, 2)
    return (
        _phantom.operator_memory("aten::topk", ""),
        list(values.shape),
        torch.accelerator.memory_allocated() - before,
    )


def test_a_user_may_allow_an_operator(phantom: PhantomOf):
    process = phantom("meta", allow=("aten::topk",))
    assert process.run(allowed) == ("allowed", [64, 2], 512 + 1024)


def without_a_kernel() -> str:
    with torch.library._scoped_library("unwritten", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        with pytest.raises(RuntimeError) as raised:
            torch.ops.unwritten.op(torch.ones(2, device="phantom"))
    return str(raised.value)


@pytest.mark.parametrize(("mode", "key"), [("meta", "Meta"), ("exact", "CPU")])
def test_an_operator_without_a_kernel_is_named(phantom: PhantomOf, mode, key):
    advice = {
        "meta": "Register one, or use install(mode='exact').",
        "exact": "Register one, or run this part on the CPU.",
    }
    process = phantom(mode, allow=("unwritten::op",))
    assert process.run(without_a_kernel) == (
        f"lowtide: phantom: operator unwritten::op: expected a kernel for {key}, got "
        f"none. {advice[mode]}"
    )


def escapes() -> list[str]:
    """Operators that CUDA has a kernel for, torch composes on this device without
    asking the list, and nobody reviewed."""
    from lowtide import _phantom

    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or not has_kernel(name, "CUDA"):
            continue
        composed = not has_kernel(name, "PrivateUse1") and (
            has_kernel(name, "CompositeImplicitAutograd")
            or has_kernel(name, "CompositeExplicitAutograd")
        )
        memory = _phantom.operator_memory(*(name + ".").split(".")[:2])
        if composed and memory not in ("parts", "view"):
            found.append(name)
    return found


def test_no_operator_escapes_the_list(phantom: PhantomOf):
    assert phantom("meta").run(escapes) == []
