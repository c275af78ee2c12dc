"""What a unit registers on its modules: the C++ hooks (python/forward_hooks.h), and
what stands in for them where a call has tangents.

[Note: Tangents of a unit]
A tangent, torch.autograd.forward_ad's or torch.func.jvp's, has a graph of its own, that
of what computed it, weights included, of which the C++ hooks see nothing: the node that
they put on a unit's inputs would cut it. Inside of jvp they do not see the tensors of
autograd's own graph, either, which are wrapped there. So a unit gathers as ever; its
inputs are not watched, which is what a call without inputs that require grad is; of its
outputs what is inside of the wrappers is watched, tangents included. Casts are
differentiated like the rest of the forward.

torch.func.grad and its like differentiate by graphs of their own: those are refused
(python/forward_hooks.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.distributed.fsdp import MixedPrecisionPolicy, _fully_shard
from torch.distributed.utils import _apply_to_tensors

from lowtide import _C

_SKIP, _DEFAULT = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
_F = TypeVar("_F", bound=Callable[..., Any])
_Jvp, _Vmap = _functorch.TransformType.Jvp, _functorch.TransformType.Vmap


class Hooked(Protocol):
    """A unit's state: what is asked of it here."""

    hooks: _C.ForwardHooks
    policy: MixedPrecisionPolicy
    device: torch.device
    explains_errors: bool  # it is a root

    @property
    def is_first(self) -> bool: ...


def hooks_of(state: Hooked) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Of a unit's modules, before and after forward."""
    pre, post = state.hooks.pre, state.hooks.post

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if forward_ad._current_level >= 0 and _only_tangents():
            return _enter_with_tangents(state, module, args, kwargs)
        return pre(module, args, kwargs)

    def leave(
        module: nn.Module, args: Any, output: Any, casts_output: bool = True
    ) -> Any:
        if forward_ad._current_level >= 0 and _only_tangents():
            return _leave_with_tangents(state, module, output, casts_output)
        return post(module, args, output, casts_output)

    hook: Any
    for hook in (enter, leave):
        # Programs that take FSDP2's hooks off, to run on what they have gathered, know
        # them by their module.
        hook.__module__ = f"{_fully_shard.__name__}.lowtide"
        # Like the C++ hooks; what it calls may be compiled.
        hook._torchdynamo_disable = True
        _as_it_is(hook, _DEFAULT)
    return enter, leave


def _as_it_is(function: _F, what_it_calls: Any = _SKIP) -> _F:
    """torch.compile leaves it so."""
    strategy = eval_frame._FrameExecStrategy(_SKIP, what_it_calls)
    of: Any = function
    eval_frame.set_code_exec_strategy(of.__code__, strategy)
    return function


# -- tangents -------------------------------------------------------------------------


@_as_it_is
def _only_tangents() -> bool:
    """No other derivatives of torch.func's are being taken."""
    kinds = {each.key() for each in _functorch.get_interpreter_stack() or ()}
    return kinds <= {_Jvp, _Vmap}


@_as_it_is
def _enter_with_tangents(
    state: Hooked, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    with temporarily_clear_interpreter_stack():
        state.hooks.pre(module, (), {})
    policy = state.policy
    casts = state.is_first and policy.cast_forward_inputs
    dtype = policy.param_dtype if casts else None

    def prepared(tensor: Tensor) -> Tensor:
        if state.explains_errors and state.device.type != "cpu":
            tensor = tensor.to(state.device)
        return _cast(tensor, dtype)

    return _apply_to_tensors(prepared, (args, kwargs))


@_as_it_is
def _leave_with_tangents(
    state: Hooked, module: nn.Module, output: Any, casts_output: bool
) -> Any:
    outputs: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        outputs.append(tensor)
        return tensor

    _apply_to_tensors(note, output)
    watched = _inside_of(outputs)
    with temporarily_clear_interpreter_stack():
        state.hooks.post(module, (), watched, casts_output=False)
    dtype = state.policy.output_dtype
    if dtype is None or not casts_output or not state.is_first:
        return None
    return _apply_to_tensors(lambda tensor: _cast(tensor, dtype), output)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor


def _inside_of(tensors: list[Tensor]) -> list[Tensor]:
    """What autograd's own graph has for them and for their tangents."""
    innermost = _functorch.peek_interpreter_stack()
    if innermost is None or innermost.key() == _Jvp:
        tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in tensors]
        tensors = [*tensors, *(each for each in tangents if each is not None)]
    if innermost is None:
        return tensors
    level = innermost.level()
    below = [
        _functorch.get_unwrapped(tensor)
        if _functorch.maybe_get_level(tensor) == level
        else tensor
        for tensor in tensors
    ]
    with temporarily_pop_interpreter_stack():
        return _inside_of(below)
