"""This rank's rows as parameters and gradients that an optimizer takes for plain.

An optimizer works element by element, so the rows suffice. What torch's gradient
clipping and ``GradScaler`` ask of a gradient concerns all rows: that is answered as the
sharded gradient would, with its collectives.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim.optimizer import _foreach_supported_types


class LocalGradient(Tensor):
    """This rank's rows of a gradient."""

    _spec: DTensorSpec  # of the whole
    # Read by optimizers for every parameter; Tensor's own asks __torch_function__.
    is_sparse = False
    is_sparse_csr = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        answer = _OVER_ALL_ROWS.get(func)
        if answer is not None:
            return answer(func, *args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def local_gradient_of(gradient: Tensor) -> Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    local = Tensor._make_subclass(LocalGradient, gradient._local_tensor)
    assert isinstance(local, LocalGradient)
    local._spec = gradient._spec
    return local


class LocalParameter(nn.Parameter):
    """This rank's rows of a sharded parameter: the same bytes, and as ``.grad`` the
    same rows of the sharded parameter's, so setting either to None does both."""

    _sharded: Any  # the parameter
    # The rows of the gradient that was last asked for and what was made of them:
    # optimizers ask three times in a step. Forgotten when they die. (No reference to
    # the gradient itself: Module.to swaps gradients that have none.)
    _seen: tuple["weakref.ref[Tensor]", LocalGradient] | None = None
    _forget: Callable[[Any], None]

    @property
    def grad(self) -> Tensor | None:
        gradient = self._sharded.grad
        if not isinstance(gradient, DTensor):
            return gradient
        rows, seen = gradient._local_tensor, self._seen
        if seen is not None and seen[0]() is rows and seen[1]._spec is gradient._spec:
            return seen[1]
        if not same_layout(gradient._spec, self._sharded._spec):
            raise ValueError(
                "lowtide: local_parameters: expected a gradient of the parameter's "
                f"placements, {self._sharded._spec}, got {gradient._spec}. "
                "Redistribute it, or give the optimizer model.parameters()."
            )
        local = local_gradient_of(gradient)
        assert isinstance(local, LocalGradient)
        self._seen = weakref.ref(rows, self._forget), local
        return local

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise ValueError(
                "lowtide: local_parameters: expected .grad to be set to None, got a "
                "tensor. Change the gradient in place, or set the sharded parameter's; "
                "a state dict is taken inside `with lowtide.sharded_optimizer(...)`."
            )
        self._sharded.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Rows of its own, which belong to no sharded parameter."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy


def _forget_seen(owner: "weakref.ref[LocalParameter]", rows: Any) -> None:
    if (local := owner()) is not None:
        local._seen = None


# Optimizers loop over parameters of types that are not in it, as DTensor is.
_foreach_supported_types.append(LocalParameter)


def local_parameter_of(parameter: Tensor) -> Any:
    if not isinstance(parameter, DTensor):
        return parameter
    local = Tensor._make_subclass(
        LocalParameter, parameter._local_tensor.detach(), parameter.requires_grad
    )
    assert isinstance(local, LocalParameter)
    local._sharded = parameter
    local._forget = functools.partial(_forget_seen, weakref.ref(local))
    return local


def rows_of(tensor: Tensor) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_of(parameter: Tensor) -> Any:
    return parameter._sharded if isinstance(parameter, LocalParameter) else parameter


def as_sharded(parameter: Any, state: Any) -> Any:
    """A state that is as long as a sharded parameter's rows is sharded, too."""
    if isinstance(parameter, DTensor) and is_of_rows(state, parameter):
        return DTensor(rows_of(state), parameter._spec, requires_grad=False)
    return state


def same_layout(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Whether rows of one are the other's rows."""
    return one is other or (one.mesh, one.placements) == (other.mesh, other.placements)


def is_of_rows(state: Any, parameter: Tensor) -> bool:
    """As an elementwise optimizer's moments are, and its counters are not."""
    if not isinstance(state, Tensor) or state.dim() == 0:
        return False
    shape: torch.Size = rows_of(state).shape
    return shape == rows_of(parameter).shape


# -- what concerns all rows -----------------------------------------------------------


def _whole(gradient: Tensor) -> Tensor:
    if not isinstance(gradient, LocalGradient):
        return gradient
    with torch._C.DisableTorchFunctionSubclass():
        return DTensor(gradient.detach(), gradient._spec, requires_grad=False)


def _norm(func: Callable[..., Any], gradient: Tensor, *args: Any, **kwargs: Any) -> Any:
    norm = func(_whole(gradient), *args, **kwargs)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _norms(
    func: Callable[..., Any], gradients: Sequence[Tensor], *args: Any, **kwargs: Any
) -> list[Tensor]:
    return [
        norm.full_tensor() if isinstance(norm, DTensor) else norm
        for gradient in gradients
        for norm in func([_whole(gradient)], *args, **kwargs)
    ]


def _unscale(
    func: Callable[..., Any],
    gradients: Sequence[Tensor],
    found_inf: Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """One rank's overflow is every rank's."""
    alike: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        spec = gradient._spec if isinstance(gradient, LocalGradient) else None
        key = None if spec is None else (spec.mesh, spec.placements)
        alike.setdefault(key, []).append(_whole(gradient))
    for wholes in alike.values():
        func(wholes, found_inf, *args, **kwargs)


_OVER_ALL_ROWS: dict[Any, Callable[..., Any]] = {
    torch.norm: _norm,
    Tensor.norm: _norm,
    torch.linalg.norm: _norm,
    torch.linalg.vector_norm: _norm,
    torch._foreach_norm: _norms,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
