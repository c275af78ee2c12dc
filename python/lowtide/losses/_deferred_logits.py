"""A tensor that stands for the logits of a head that has not been multiplied yet.

It is seen by `__torch_function__` and so before autograd. Two things are true of every
one: ``hidden``, whose rows times the head are its rows, and how to get its numbers from
those of the head's whole output. What only chooses or groups tokens, or widens the
dtype, is done to ``hidden`` and gives another such tensor; `F.cross_entropy` and
`torch.logsumexp` become those of ``hidden``; everything else gets the numbers.
"""

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.overrides import resolve_name
from torch.utils._pytree import tree_map_only

HALF = (torch.bfloat16, torch.float16)
_CAST = "ToCopyBackward0"  # of a `to` that C++ called
_MAKE_BEFORE = (
    "Make the logits before (logits = logits.clone()), or do not defer this head's."
)
# Folders whose frames are not the place that asked.
_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class HeadCall(Protocol):
    """One call of a head, not made yet."""

    def require_unchanged(self) -> None: ...

    def say_made(self, what: str) -> None: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def loss(
        self, hidden: Tensor, targets: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss and `Saved`, [tokens] each, whose backward is the loss's."""

    def sums(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`Saved` without a loss."""

    @property
    def has_one_backward(self) -> bool:
        """Whether one of these alone can be in a backward."""


class _Family:
    """The logits of one call and what was derived of them: they are made together."""

    def __init__(self, call: HeadCall) -> None:
        self.call = call
        self.logits: Tensor | None = None
        self.version = 0
        self.members: weakref.WeakSet[DeferredLogits] = weakref.WeakSet()
        # `Saved` of tokens whose loss was computed, by `DeferredLogits._tokens`.
        self.sums: dict[Any, tuple[Tensor, Tensor]] = {}


class Reason(str):
    """Why an operation that may be deferred is not, this time."""


# What keeps logits deferred: `_deferred_rules` fills this. A rule gets deferred logits
# and the other arguments.
RULES: dict[Any, Callable[..., Any]] = {}


class DeferredLogits(Tensor):
    """See this file's beginning. ``hidden``: [..., D] for logits of [..., V]."""

    _family: _Family
    _hidden: Tensor
    _tokens: tuple[Any, ...]  # which of the call, in order: equal where the same are
    _parent: "DeferredLogits | None"
    _of_parent: Callable[[Tensor], Tensor]
    _copies: bool
    _real: Tensor | None
    _node: Any

    @staticmethod
    def of_call(
        call: HeadCall,
        hidden: Tensor,
        vocab_size: int,
        dtype: torch.dtype,
        requires_grad: bool,
    ) -> "DeferredLogits":
        """The logits ``call.logits(hidden)``, [..., vocab_size]."""
        return _stand_in(_Family(call), hidden, vocab_size, dtype, requires_grad)

    def _derive(
        self,
        of_hidden: Callable[[Tensor], Tensor],
        of_logits: Callable[[Tensor], Tensor],
        dtype: torch.dtype | None = None,
        chosen: Any = None,
    ) -> "DeferredLogits":
        """``chosen``: tells which tokens this takes; None for all, in order."""
        derived = _stand_in(
            self._family,
            of_hidden(self._hidden),
            self.shape[-1],
            dtype or self.dtype,
            self.requires_grad and torch.is_grad_enabled(),
        )
        derived._parent, derived._of_parent = self, of_logits
        derived._copies, derived._tokens = dtype is not None, self._tokens
        if chosen is not None:
            derived._tokens += ((self.shape, chosen),)
        return derived

    def _cast(self, dtype: torch.dtype) -> "DeferredLogits":
        """Below autograd, which gives it a node that leads to this one's."""
        cast = _made(self._family, self._hidden, self.shape[-1], dtype)
        cast._parent, cast._copies = self, True
        cast._of_parent, cast._node = lambda z: z.to(dtype), None
        cast._tokens = self._tokens
        return cast

    def _require_own_graph(self) -> None:
        """What a custom function returned has its node, which would be left out."""
        with torch._C.DisableTorchFunctionSubclass():
            node = self.grad_fn
        if node is not self._node and (node is None or node.name() != _CAST):
            raise RuntimeError(
                "lowtide: deferred logits: expected them as the head returned them, "
                f"got them from {node.name() if node else 'detach'}. {_MAKE_BEFORE}"
            )

    def _numbers(self) -> Tensor:
        """What this stands for: made once, with its graph."""
        self._require_own_graph()
        family = self._family
        if family.logits is None:
            first = self
            while first._parent is not None:
                first = first._parent
            family.logits = family.call.logits(_through(first._hidden, family.members))
            family.version = _version(family.logits)
        if self._real is None:
            if self._parent is None:
                self._real = family.logits
            else:
                if self._copies and _version(family.logits) != family.version:
                    raise RuntimeError(
                        "lowtide: deferred logits: expected a copy of them to be "
                        "looked at before they are written to in place, got it after. "
                        "Look at it before, or write out of place."
                    )
                of_parent = self._parent._numbers()
                with torch.set_grad_enabled(self.requires_grad):
                    self._real = self._of_parent(of_parent)
        return self._real

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        reason = ""
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, DeferredLogits) and first._family.logits is None:
            if (rule := RULES.get(func)) is not None:
                first._require_own_graph()
                first._family.call.require_unchanged()
                rest = {k: v for k, v in kwargs.items() if k != "input"}
                deferred = rule(first, *args[1:], **rest)
                if not isinstance(deferred, Reason):
                    return deferred
                reason = deferred
        name = resolve_name(func) or getattr(func, "__name__", str(func))

        def numbers(deferred: DeferredLogits) -> Tensor:
            if deferred._family.logits is None:
                said = f"{name} ({reason})" if reason else name
                deferred._family.call.say_made(said)
            return deferred._numbers()

        args, kwargs = tree_map_only(DeferredLogits, numbers, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Comes from C++, and below autograd: numbers made here have no graph."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and set(kwargs) == {"dtype"}:
            if widens(args[0].dtype, kwargs["dtype"]):
                return args[0]._cast(kwargs["dtype"])
        if torch.is_grad_enabled() and any(
            isinstance(arg, DeferredLogits) and arg.requires_grad for arg in args
        ):
            raise RuntimeError(
                "lowtide: deferred logits: expected operations called from Python, "
                f"got {func} from C++, whose gradient would be lost. {_MAKE_BEFORE}"
            )

        def numbers(deferred: DeferredLogits) -> Tensor:
            if deferred._family.logits is None:
                deferred._family.call.say_made(str(func))
            return deferred._numbers().detach()

        args, kwargs = tree_map_only(DeferredLogits, numbers, (args, kwargs))
        return func(*args, **kwargs)


def warn_made(what: str, told: set[tuple[str, str, int]]) -> None:
    """Who asked for the logits, once per place, which is added to ``told``. Python
    itself says it again whenever a filter of its warnings was changed meanwhile, as by
    torch in every call of `resolve_name`."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    place = (what, frame.f_code.co_filename, frame.f_lineno)
    if place in told:
        return
    warnings.warn(
        f"lowtide: deferred logits: {what} needs the logits, which are made now. "
        "docs/losses.md lists what keeps them deferred.",
        stacklevel=level,
    )
    told.add(place)  # not where a filter made an error of it


# -- autograd -------------------------------------------------------------------------


class _StandIn(torch.autograd.Function):
    """(stand-in, hidden): hooks on the node of the stand-in, such as those of a sharded
    model on what its forward returns, run when the gradient of hidden comes by."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, make: Callable[[Tensor], DeferredLogits]
    ) -> tuple[DeferredLogits, Tensor]:
        ctx.set_materialize_grads(False)
        return make(hidden), hidden.view_as(hidden)

    @staticmethod
    def backward(
        ctx: FunctionCtx, of_logits: Tensor | None, of_hidden: Tensor | None
    ) -> tuple[Tensor | None, None]:
        if of_logits is not None:
            raise RuntimeError(
                "lowtide: deferred logits: expected gradients of what was made of them "
                "by operations, got some from a custom autograd.Function (as of "
                "DistributedDataParallel with find_unused_parameters or static_graph). "
                f"{_MAKE_BEFORE}"
            )
        return of_hidden, None


class _Through(torch.autograd.Function):
    """A tensor, and in backward a visit without a gradient to the other inputs: the
    nodes of stand-ins whose numbers come from elsewhere."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, *visited: Tensor) -> Tensor:
        ctx.visited = len(visited)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None for _ in range(ctx.visited))


def _through(hidden: Tensor, members: Any) -> Tensor:
    derived = [member._hidden for member in members if member._parent is not None]
    return visiting(hidden, derived)


def visiting(tensor: Tensor, others: list[Tensor]) -> Tensor:
    """``tensor``, whose backward visits the nodes of ``others``, too."""
    visited = [other for other in others if other.requires_grad]
    if not visited or not torch.is_grad_enabled():
        return tensor
    return _Through.apply(tensor, *visited)


def _stand_in(
    family: _Family,
    hidden: Tensor,
    vocab_size: int,
    dtype: torch.dtype,
    requires_grad: bool,
) -> DeferredLogits:
    if not (requires_grad and hidden.requires_grad):
        logits = _made(family, hidden, vocab_size, dtype)
        with torch._C.DisableTorchFunctionSubclass():
            logits.requires_grad_(requires_grad)
        return logits
    make = functools.partial(_made, family, vocab_size=vocab_size, dtype=dtype)
    logits, logits._hidden = _StandIn.apply(hidden, make)
    with torch._C.DisableTorchFunctionSubclass():
        logits._node = logits.grad_fn
    return logits


def _made(
    family: _Family, hidden: Tensor, vocab_size: int, dtype: torch.dtype
) -> DeferredLogits:
    logits = Tensor._make_wrapper_subclass(
        DeferredLogits,
        (*hidden.shape[:-1], vocab_size),
        dtype=dtype,
        device=hidden.device,
    )
    logits._family, logits._hidden, logits._parent = family, hidden, None
    logits._of_parent, logits._copies, logits._real = itself, False, None
    logits._tokens, logits._node = (), None
    family.members.add(logits)
    return logits


def itself(tensor: Tensor) -> Tensor:
    return tensor


def widens(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether the loss of logits rounded to ``old`` is that of them in ``new``."""
    return old in HALF and new == torch.float32


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# What is known without the numbers.
_METADATA: set[Any] = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf"),
            *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested"),
            *("is_mps", "is_xpu", "is_mkldnn", "itemsize", "nbytes"),
            *("grad_fn", "output_nr"),
        )
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension),
    *(Tensor.element_size, Tensor.get_device, Tensor.is_floating_point),
    *(Tensor.is_complex, Tensor.is_inference, Tensor.__len__, Tensor.stride),
    *(Tensor.is_contiguous, Tensor.storage_offset),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference),
}
