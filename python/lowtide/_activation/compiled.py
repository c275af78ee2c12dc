"""Regions inside one compiled graph: torch's partitioner does there what a region does
eagerly.

Imported by Dynamo when it traces a checkpointed module, never before: torch.compile's
modules take seconds to import. Functions marked ``_while_tracing`` run when Dynamo
traces, under its lock, and leave nothing in the graph.

[Note: Marks] ``lowtide::named`` is composite and returns its argument, so no graph that
runs has it. When AOTAutograd traces it, it finds the node that computes the value and
sets what the partitioner reads: ``meta["recompute"]``, ``meta["should_offload"]``. What
it does follows from its arguments alone, because compiler caches know only them.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lowtide._activation import regions
from lowtide.policies import INPUT, ActivationPolicy

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _while_tracing(function: _Function) -> _Function:
    # What torch._dynamo.assume_constant_result does, without its wrapper.
    function._dynamo_marked_constant = True
    return function


# -- the regions Dynamo is in ---------------------------------------------------------


@dataclasses.dataclass
class _Open:
    policy: ActivationPolicy
    trace: weakref.ref[TracingContext]
    values: dict[str, int]  # name -> how many have it


_open: list[_Open] = []
_latest: dict[ActivationPolicy, weakref.ref[TracingContext]] = {}


@_while_tracing
def _enter(key: str, module_name: str) -> str:
    """Why a region has to run outside of the graph; empty if it has not."""
    trace = weakref.ref(TracingContext.get())
    if _open and _open[-1].trace != trace:
        _open.clear()  # that trace failed
    policy = regions.policies_by_key[key]
    who = f"lowtide: checkpoint({module_name})"
    if policy.offload and not functorch_config.enable_activation_offloading:
        return (
            f"{who}: expected a policy without offload inside one compiled graph, got "
            f"offload={list(policy.offload)}. Compile without fullgraph: the region "
            "then runs eagerly, outside of the graph; or set "
            "torch._functorch.config.enable_activation_offloading for torch's copies."
        )
    if policy.offload and policy.keep_last:
        return (
            f"{who}: expected keep_last=0 where torch's compiler copies, got "
            f"{policy.keep_last}. Compile without fullgraph: the region then runs "
            "eagerly, outside of the graph."
        )
    _open.append(_Open(policy, trace, {}))
    return ""


@_while_tracing
def _leave(module_name: str) -> str:
    """Why names were not found; empty if all were."""
    left = _open.pop()
    policy = left.policy
    if _latest.get(policy) != left.trace:
        _latest[policy] = left.trace
        regions.names_in_graphs[policy] = {}
    found = regions.names_in_graphs[policy]
    for name, count in left.values.items():
        found[name] = found.get(name, 0) + count
    missing = [name for name in policy.treatments() if name not in found]
    if not missing:
        return ""
    return (
        f"lowtide: checkpoint({module_name}): expected the policy's names on values of "
        f"at least min_bytes={policy.min_bytes} in one compiled graph, got none called "
        f"{missing}. Compile without fullgraph: the region then runs eagerly, and its "
        "first backward says why."
    )


def _innermost(name: str) -> _Open | None:
    for each in reversed(_open):
        if name in each.policy.treatments():
            return each
    return None


@_while_tracing
def _treatment(name: str) -> str:
    found = _innermost(name)
    if found is None:
        regions.names_in_compiled_code.add(name)
        return ""
    return found.policy.treatments()[name]


@_while_tracing
def _min_bytes(name: str) -> int:
    found = _innermost(name)
    return found.policy.min_bytes if found else 0


@_while_tracing
def _count(name: str) -> None:
    if (found := _innermost(name)) is not None:
        found.values[name] = found.values.get(name, 0) + 1


# -- what Dynamo traces ---------------------------------------------------------------


def tag(x: Tensor, name: str) -> Tensor:
    treatment = _treatment(name)
    if treatment == "" or isinstance(x, nn.Parameter):
        return x
    if treatment == "recompute":
        _count(name)
        return x
    if x.numel() * x.element_size() < _min_bytes(name):
        return x
    _count(name)
    return torch.ops.lowtide.named(x, name, treatment)


@_while_tracing
def _lists_input() -> bool:
    return INPUT in _open[-1].policy.treatments()


def _tag_input(x: Tensor) -> Tensor:
    return tag(x, INPUT) if x.requires_grad else x


@torch._dynamo.substitute_in_graph(regions.run_region)
def _run_region(module: nn.Module, args: Any, kwargs: Any) -> Any:
    region: regions.RegionState = module._lowtide_region  # type: ignore[assignment]
    call, module_name = region.call, region.module_name
    if not torch.is_grad_enabled():
        return call(module, *args, **kwargs)
    if reason := _enter(region.policy_key, module_name):
        torch._dynamo.graph_break(msg=reason)
    if _lists_input():
        args, kwargs = tree_map_only(Tensor, _tag_input, (args, kwargs))

    def forward() -> Any:
        return call(module, *args, **kwargs)

    result = torch_checkpoint(forward, use_reentrant=False)
    if reason := _leave(module_name):
        torch._dynamo.graph_break(msg=reason)
    return result


# -- what AOTAutograd traces ----------------------------------------------------------


def _named(x: Tensor, name: str, treatment: str) -> Tensor:
    if isinstance(x, FunctionalTensor):
        mode = get_proxy_mode()
        if mode is not None:
            value = torch._from_functional_tensor(x.elem)
            slot = get_proxy_slot(value, mode.tracer, None)
            if slot is not None:
                _mark(_producer(slot.proxy.node), name, treatment)
    elif is_traceable_wrapper_subclass(x):
        for part in x.__tensor_flatten__()[0]:
            _named(getattr(x, part), name, treatment)
    elif not isinstance(x, FakeTensor) and torch.is_grad_enabled():
        raise RuntimeError(
            f"lowtide: ActivationPolicy.{treatment}: expected {name!r} in a graph for "
            "AOTAutograd, got a backend that runs the operators as they are and "
            "computes nothing again. Use backend='aot_eager' or 'inductor'."
        )
    return x


def _producer(node: Node) -> Node:
    """What computes the bytes: views cost nothing to compute again."""
    while node.op == "call_function":
        several = node.target is operator.getitem
        call = node.args[0] if several else node
        if not (isinstance(call, Node) and _is_view(call.target)):
            break
        source = call.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def _is_view(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.is_view


def _mark(node: Node, name: str, treatment: str) -> None:
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if treatment == "save":
        return
    if node.target is operator.getitem or not node.meta["val"].is_contiguous():
        raise ValueError(
            f"lowtide: ActivationPolicy.offload: expected {name!r} to be the "
            "contiguous and only result of its operator inside one compiled graph, got "
            f"{node.format_node()}. List it in save, or compile without torch's "
            "copies: torch._functorch.config.enable_activation_offloading = False."
        )
    node.meta["should_offload"] = True


_library = torch.library.Library("lowtide", "DEF")
_library.define("named(Tensor x, str name, str treatment) -> Tensor")
_library.impl("named", _named, "CompositeImplicitAutograd")
