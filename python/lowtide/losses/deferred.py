"""``defer_logits``: a head whose logits are not made until someone looks."""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from lowtide._base.classes import ClassSwap, class_name
from lowtide._sharding.fused import has_own_forward
from lowtide._sharding.optimizers import steps_of
from lowtide._sharding.owners import owner_of
from lowtide._sharding.unit import UnitState, local_of, unit_state
from lowtide._torch_version import CASTS_EACH_OF_A_LIST
from lowtide.losses import _deferred_rules as _deferred_rules  # fills RULES
from lowtide.losses._deferred_logits import DeferredLogits, warn_made
from lowtide.losses._heads import tally_of
from lowtide.losses._sharded import can_stream, gathered_whole
from lowtide.losses.linear import loss_and_sums

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_IN_GRAPH = "a graph of torch.compile that calls the head"
_KEY = "_lowtide_deferred"  # the attribute by which a graph's trace knows a head


def defer_logits(head: nn.Linear) -> None:
    """Has ``head`` return logits that are not made until someone looks.

    Its output has the shape, dtype and device of the logits. ``F.cross_entropy`` of it
    is ``linear_cross_entropy(hidden, head, targets)``: no tensor of tokens x vocabulary
    is made; ``logsumexp`` of the same tokens comes with it. ``.float()``,
    ``.view(-1, V)`` and the like, and slices of tokens, keep it deferred; whatever else
    touches it gets the logits, made once, with their graph and the bits that the head
    gives, and a ``UserWarning`` names the operation, once per place. docs/losses.md
    lists both. Call it before or after ``fully_shard``, alike on all ranks.

    Logits must be looked at, or lost, before ``hidden`` or the head's weight change;
    RuntimeError after that. Raises ValueError for a module that is no ``nn.Linear``
    with its class's forward.
    """
    if not isinstance(head, nn.Linear) or has_own_forward(head):
        raise ValueError(
            "lowtide: defer_logits: expected an nn.Linear with its class's forward, "
            f"got {class_name(head)}. Use linear_cross_entropy with the head's weight."
        )
    if type(head).__call__ is not _call:
        _defer(head)


class _Call:
    """One call of ``head`` with ``hidden``, and the state it was called in."""

    def __init__(self, head: nn.Linear, hidden: Tensor) -> None:
        self._head = head
        self._grad = torch.is_grad_enabled()
        self._device = hidden.device.type
        self._autocast = torch.is_autocast_enabled(self._device)
        self._autocast_dtype = torch.get_autocast_dtype(self._device)
        self._read = [("hidden", hidden), *_values_of(head)]
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        state = unit_state(self._head)
        steps = 0 if state is None else steps_of(state)
        return [*(_version(tensor) for _, tensor in self._read), steps]

    def require_unchanged(self) -> None:
        names = [*(name for name, _ in self._read), "the head's weight"]
        versions = zip(names, self._versions, self._versions_now(), strict=True)
        for name, before, now in versions:
            if now != before:
                raise RuntimeError(
                    f"lowtide: deferred logits: expected {name} as it was when the "
                    "head was called, got it written to since. Look at the logits "
                    "before (logits = logits.clone()), or do not defer this head's."
                )

    def say_made(self, what: str) -> None:
        _say_made(self._head, what)

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode(False), self._as_called(self._grad):
            if unit_state(self._head) is not None:
                # With the hooks of its unit, which gathers it.
                return nn.Module.__call__(self._head, hidden)
            self._require_gathered()
            return self._head.forward(hidden)

    def loss(
        self, hidden: Tensor, targets: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        tally_of(self._head).losses += 1
        return self._pass(hidden, targets, **settings)

    def sums(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        ignored = hidden.new_full(hidden.shape[:-1], -100, dtype=torch.int64)
        _, top, total = self._pass(hidden, ignored, reduction="sum")
        return top, total

    @property
    def has_one_backward(self) -> bool:
        state = unit_state(self._head)
        streams = state is not None and _streams(state, self._head)
        return streams and self._head.weight.requires_grad

    def _pass(
        self, hidden: Tensor, targets: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = self._head

        def of_tensors(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return loss_and_sums(
                hidden, head.weight, targets, bias=head.bias, **settings
            )

        with self._as_called(torch.is_grad_enabled()):
            state = unit_state(head)
            if state is None:
                self._require_gathered()
                return of_tensors(hidden)
            if isinstance(head.weight, DTensor) and _streams(state, head):
                return loss_and_sums(hidden, head, targets, **settings)
            # A backward that needs the weight begins at the loss: the unit watches it.
            return gathered_whole(state, head, hidden, of_tensors)

    @contextmanager
    def _as_called(self, grad: bool) -> Iterator[None]:
        self.require_unchanged()
        with (
            torch.set_grad_enabled(grad),
            torch.autocast(self._device, self._autocast_dtype, self._autocast),
        ):
            yield

    def _require_gathered(self) -> None:
        if isinstance(self._head.weight, DTensor):
            raise RuntimeError(
                "lowtide: deferred logits: expected the head's weight to stay gathered "
                "until its loss, got it resharded with the unit that it is in. Shard "
                "the head by itself (fully_shard(head)), pass "
                "reshard_after_forward=False for its unit, or have the loss in the "
                "forward of the model."
            )


def _values_of(head: nn.Linear) -> Iterator[tuple[str, Tensor]]:
    """The parameters, and the shards that they are gathered from: an optimizer writes
    to a DTensor, whose local tensor does not count that, and others to the local."""
    state = unit_state(head)
    units = () if state is None else state.together
    shards = [parameter for unit in units for parameter in unit.parameters]
    for name, parameter in head.named_parameters(recurse=False):
        yield f"the head's {name}", parameter
        for shard in (p.shard for p in shards if (head, name) in p.slots):
            yield f"the head's {name}", shard
            yield f"the head's {name}", local_of(shard)


def _version(tensor: Tensor) -> int:
    # To whoever watches functions, this does not read the values.
    with torch._C.DisableTorchFunction():
        return 0 if tensor.is_inference() else tensor._version


def _say_made(head: nn.Linear, what: str) -> None:
    tally = tally_of(head)
    tally.made[what] += 1
    warn_made(what, tally.told)


_numbers = itertools.count()
_by_key: weakref.WeakValueDictionary[str, nn.Linear] = weakref.WeakValueDictionary()


def _say_in_graph(key: str) -> None:
    """Called while Dynamo traces; leaves nothing in the graph."""
    if (head := _by_key.get(key)) is not None:
        _say_made(head, _IN_GRAPH)


# What torch._dynamo.assume_constant_result does, without importing it.
_say_in_graph._dynamo_marked_constant = True


# -- whether a call may wait ----------------------------------------------------------


def _call(self: nn.Linear, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return _call_eagerly(self, *args, **kwargs)
    if not _is_sharded(self):
        # Its graph may have to be whole.
        _say_in_graph(getattr(self, _KEY))
        return nn.Module.__call__(self, *args, **kwargs)
    return _call_between_graphs(self, *args, **kwargs)


def _is_sharded(head: nn.Linear) -> bool:
    """Units' hooks end graphs in any case."""
    return getattr(head, "_is_fsdp_managed_module", False) is True


def _call_eagerly(self: nn.Linear, *args: Any, **kwargs: Any) -> Any:
    hidden = args[0] if len(args) == 1 and not kwargs else kwargs.get("input")
    if len(args) + len(kwargs) != 1 or not isinstance(hidden, Tensor):
        return nn.Module.__call__(self, *args, **kwargs)
    state = unit_state(self)
    if state is not None and _casts_inputs(state, self) and hidden.is_floating_point():
        hidden = hidden.to(state.policy.param_dtype)
    tally_of(self).calls += 1
    if (reason := _obstacle(self, state, hidden)) is not None:
        _say_made(self, f"a head with {reason}")
        return nn.Module.__call__(self, *args, **kwargs)
    dtype = _dtype_of_product(hidden)
    if state is not None and _casts_outputs(state, self):
        dtype = state.policy.output_dtype or dtype
    parameters = [p for p in (self.weight, self.bias) if p is not None]
    return DeferredLogits.of_call(
        _Call(self, hidden),
        hidden,
        self.out_features,
        dtype,
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in (hidden, *parameters)),
    )


_call_between_graphs = torch.compiler.disable(_call_eagerly)


def _obstacle(head: nn.Linear, state: UnitState | None, hidden: Tensor) -> str | None:
    """Why the call has to be made now."""
    if has_own_forward(head):
        return "its own forward"
    if _is_hooked(head, state):
        return "hooks, which want its output"
    if type(hidden) not in (Tensor, nn.Parameter):
        return f"an input that is a {type(hidden).__name__}"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func around it"
    weight = head.weight
    if isinstance(weight, DTensor):
        assert isinstance(weight, nn.Parameter)
        owner = owner_of(weight)
        if owner is None or owner.parallel is not None:
            return "a weight that is a DTensor"
        if state is None or owner not in state.parameters:
            return "a weight that another unit gathers"
        compute = state.dtypes(owner).compute
    elif type(weight) not in (Tensor, nn.Parameter):
        return f"a weight that is a {type(weight).__name__}"
    else:
        compute = weight.dtype
    if hidden.dtype not in _DTYPES or hidden.dim() < 1:
        return f"an input of dtype {hidden.dtype}"
    if hidden.shape[-1] != head.in_features:
        return f"an input of shape {list(hidden.shape)}"
    product = _dtype_of_product(hidden)
    if product != compute and (state is not None or product == hidden.dtype):
        return f"{product} products of a weight in {compute}"
    if state is not None and _casts_outputs(state, head):
        output = state.policy.output_dtype
        if output not in (torch.float32, product):
            return f"an output in {output}"
    return None


def _dtype_of_product(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _is_hooked(head: nn.Linear, state: UnitState | None) -> bool:
    units = () if state is None else state.together
    ours = [hook for unit in units for hook in (unit.enter, unit.leave)]
    return any(
        hook not in ours
        for hooks in (
            head._forward_hooks,
            head._forward_pre_hooks,
            head._backward_hooks,
            head._backward_pre_hooks,
            torch_module._global_forward_hooks,
            torch_module._global_forward_pre_hooks,
            torch_module._global_backward_hooks,
            torch_module._global_backward_pre_hooks,
        )
        for hook in hooks.values()
    )


def _streams(state: UnitState, head: nn.Linear) -> bool:
    return state.modules == (head,) and can_stream(state)


def _casts_inputs(state: UnitState, head: nn.Linear) -> bool:
    policy = state.policy
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return False
    return CASTS_EACH_OF_A_LIST or head is state.modules[0]


def _casts_outputs(state: UnitState, head: nn.Linear) -> bool:
    if state.policy.output_dtype is None:
        return False
    return CASTS_EACH_OF_A_LIST or head is state.modules[-1]


# -- the class ------------------------------------------------------------------------


def _deferred_class(original: type) -> type:
    def reduce(self: nn.Linear, protocol: Any) -> Any:
        _, _, state, *rest = super(made, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
        kept = {name: value for name, value in state.items() if name != _KEY}
        return _again, (original,), kept, *rest

    members = {
        "__call__": _call,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
    }
    made = type(original.__name__, (original,), members)
    return made


_deferred = ClassSwap(_deferred_class)


def _again(original: type[nn.Linear]) -> nn.Linear:
    head = original.__new__(original)
    _defer(head)
    return head


def _defer(head: nn.Linear) -> None:
    _deferred.apply(head)
    key = f"head {next(_numbers)}"
    head.__dict__[_KEY] = key
    _by_key[key] = head
