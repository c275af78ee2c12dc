"""What a compiler sees: operators it does not look into.

A traced gather would be saved, merged or moved by the partitioner. A pair of opaque
operators saves what it is told to: the shard, where the gather is done again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from lowtide import _C
from lowtide._gather.axes import axis_named, group_named


def _rows(tensor: Tensor, rows: Any, last: Any = None) -> Tensor:
    sizes = [rows, *tensor.shape[1:]]
    if last is not None:
        sizes[-1] = last
    return tensor.new_empty(sizes)


def _size(group_name: str) -> int:
    return group_named(group_name).size()


def _refuse_create_graph(name: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"lowtide: sequence-parallel gather '{name}': expected a backward without "
            "create_graph, got create_graph=True. Compute higher-order derivatives on "
            "a model without sequence parallelism."
        )


# -- all_gather and reduce_scatter --------------------------------------------------


@custom_op("lowtide::sp_all_gather", mutates_args=())
def all_gather(shard: Tensor, group_name: str, name: str) -> Tensor:
    axis = axis_named(group_name, shard.device)
    return _C.sp_all_gather(axis, shard, name, regather=False, prefetch_bytes=0)


@all_gather.register_fake
def _(shard: Tensor, group_name: str, name: str) -> Tensor:
    return _rows(shard, shard.shape[0] * _size(group_name))


@custom_op("lowtide::sp_reduce_scatter", mutates_args=())
def reduce_scatter(partial: Tensor, group_name: str) -> Tensor:
    return _C.sp_reduce_scatter(axis_named(group_name, partial.device), partial)


@reduce_scatter.register_fake
def _(partial: Tensor, group_name: str) -> Tensor:
    return _rows(partial, partial.shape[0] // _size(group_name))


def _keep_names(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.names = inputs[1:]


def _gather_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    group_name, _ = ctx.names
    return reduce_scatter(gradient, group_name), None, None


def _scatter_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    (group_name,) = ctx.names
    return all_gather(gradient, group_name, "sp_reduce_scatter"), None


all_gather.register_autograd(_gather_backward, setup_context=_keep_names)
reduce_scatter.register_autograd(_scatter_backward, setup_context=_keep_names)


# -- gather_linear ------------------------------------------------------------------


@custom_op("lowtide::sp_gather_linear", mutates_args=())
def _forward(
    shard: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    group_name: str,
    name: str,
    regather: bool,
    addmm: bool,
) -> list[Tensor]:
    """The outputs, and behind them the gathered value, empty where it is not kept."""
    *outputs, gathered = _C.sp_gather_linear_forward(
        axis_named(group_name, shard.device),
        shard,
        weights,
        _with_none(biases, has_bias),
        name,
        regather,
    )
    return [*outputs, shard.new_empty(0) if regather else gathered]


@_forward.register_fake
def _(
    shard: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    group_name: str,
    name: str,
    regather: bool,
    addmm: bool,
) -> list[Tensor]:
    rows = shard.shape[0] * _size(group_name)
    outputs = [
        _rows(shard, rows, weight.shape[0]).to(weight.dtype) for weight in weights
    ]
    return [*outputs, shard.new_empty(0) if regather else _rows(shard, rows)]


@custom_op("lowtide::sp_gather_linear_backward", mutates_args=())
def _backward(
    source: Tensor,
    gradients: list[Tensor],
    has_gradient: list[bool],
    weights: list[Tensor],
    needs: list[bool],
    group_name: str,
    name: str,
    regather: bool,
    addmm: bool,
) -> list[Tensor]:
    """Gradients of the shard, the weights and the biases, those that ``needs`` names
    and a gradient came for. ``source``: the shard, or the gathered value."""
    n = len(weights)
    dx, dw, db = _C.sp_gather_linear_backward(
        axis_named(group_name, source.device),
        source,
        regather,
        _with_none(gradients, has_gradient),
        weights,
        needs[0],
        needs[1 : n + 1],
        needs[n + 1 :],
        addmm,
        name,
    )
    return [gradient for gradient in (dx, *dw, *db) if gradient is not None]


@_backward.register_fake
def _(
    source: Tensor,
    gradients: list[Tensor],
    has_gradient: list[bool],
    weights: list[Tensor],
    needs: list[bool],
    group_name: str,
    name: str,
    regather: bool,
    addmm: bool,
) -> list[Tensor]:
    shard = source if regather else _rows(source, source.shape[0] // _size(group_name))
    made = [shard.new_empty(shard.shape)] if _gets(needs, has_gradient)[0] else []
    got = _gets(needs, has_gradient)
    for i, weight in enumerate(weights):
        if got[1 + i]:
            made.append(weight.new_empty(weight.shape))
    for i, weight in enumerate(weights):
        if got[1 + len(weights) + i]:
            made.append(weight.new_empty(weight.shape[:1]))
    return made


def _gets(needs: list[bool], has_gradient: list[bool]) -> list[bool]:
    """Which of shard, weights and biases get a gradient."""
    return [
        needs[0] and any(has_gradient),
        *(need and has for need, has in zip(needs[1:], has_gradient * 2, strict=True)),
    ]


def _with_none(tensors: list[Tensor], present: list[bool]) -> list[Tensor | None]:
    rest = iter(tensors)
    return [next(rest) if there else None for there in present]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shard, weights, _, has_bias, group_name, name, regather, addmm = inputs
    gathered = output[-1]
    ctx.save_for_backward(shard if regather else gathered, *weights)
    ctx.mark_non_differentiable(gathered)
    ctx.set_materialize_grads(False)
    ctx.has_bias, ctx.settings = has_bias, (group_name, name, regather, addmm)


def _linear_backward(ctx: Any, output_gradients: list[Tensor | None]) -> Any:
    _refuse_create_graph(ctx.settings[1])
    gradients = output_gradients[:-1]
    source, *weights = ctx.saved_tensors
    present = [gradient is not None for gradient in gradients]
    needs_weights, needs_biases = ctx.needs_input_grad[1:3]
    bias_needs = iter(needs_biases)
    needs = [
        ctx.needs_input_grad[0],
        *needs_weights,
        *(has and next(bias_needs) for has in ctx.has_bias),
    ]
    made = iter(
        _backward(
            source,
            [gradient.contiguous() for gradient in gradients if gradient is not None],
            present,
            weights,
            needs,
            *ctx.settings,
        )
    )
    got = [next(made) if there else None for there in _gets(needs, present)]
    n = len(weights)
    biases = [
        gradient
        for gradient, has in zip(got[n + 1 :], ctx.has_bias, strict=True)
        if has
    ]
    return got[0], got[1 : n + 1], biases, *(None,) * 5


_forward.register_autograd(_linear_backward, setup_context=_save)


def gather_linear(
    shard: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    group_name: str,
    name: str,
    regather: bool,
    addmm: bool,
) -> tuple[Tensor, ...]:
    *outputs, _ = _forward(
        shard,
        list(weights),
        [bias for bias in biases if bias is not None],
        [bias is not None for bias in biases],
        group_name,
        name,
        regather,
        addmm,
    )
    return tuple(outputs)


# These rules are for rule books that are exported. Inside a region lowtide's own
# functions refuse the call: what the pair sends in backward follows from no type.
_C.register_rule("lowtide::sp_all_gather", _C.rule_collective("V", "R"))
_C.register_rule("lowtide::sp_reduce_scatter", _C.rule_collective("P", "V"))
for _name in ("lowtide::sp_gather_linear", "lowtide::sp_gather_linear_backward"):
    _C.register_rule(_name, _C.rule_same_as(0))
