"""``linear_cross_entropy``: a head and its loss without the logits."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowtide._base.classes import class_name
from lowtide._sharding.fused import has_own_forward
from lowtide._sharding.unit import UnitState, unit_state
from lowtide.losses._autograd import loss_of_rows
from lowtide.losses._objective import Objective
from lowtide.losses._operators import loss_by_tokens, loss_by_vocabulary
from lowtide.losses._sharded import ShardedRows, can_stream, gathered_whole
from lowtide.losses._vocabulary_chunks import Saved

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | nn.Linear,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunking: Literal["vocabulary", "tokens"] = "vocabulary",
    token_chunk: int | None = None,
    vocab_chunk: int | None = None,
) -> Tensor:
    """``cross_entropy(linear(hidden, weight, bias), targets)`` without the logits.

    Args:
        hidden: [..., D]. A view of it as [T, D] is saved for backward.
        weight: [V, D], or an ``nn.Linear``, which brings its own bias. A linear layer
            that is a unit of its own (``fully_shard(head)``) may stay sharded: with
            ``"vocabulary"`` its rows are gathered, and their gradient reduced, chunk
            by chunk, at most once in a backward; with ``"tokens"`` it is gathered
            once as in its own forward. Call the loss on all ranks alike.
        targets: int64, the shape of ``hidden`` without D; class indices.
        bias: [V].
        ignore_index: targets of this value count neither in the loss nor in the mean.
        label_smoothing: epsilon in [0, 1], as in torch.
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to a token's loss.
        reduction: ``"mean"`` over the tokens that are not ignored, ``"sum"``, or
            ``"none"``: each token's loss, zero if ignored, by ``"vocabulary"`` only.
        chunking: ``"vocabulary"`` needs the least memory: it computes logits again in
            backward, 4/3 of the plain loss's arithmetic. ``"tokens"`` computes
            gradients in forward, the arithmetic of the plain loss, and holds a tile as
            wide as the vocabulary.
        token_chunk: tokens in a tile of logits.
        vocab_chunk: rows of the head in a tile, for ``"vocabulary"`` only.

    Returns the loss, 0-dim or of the shape of ``targets``, fp32 (fp64 for fp64 inputs).
    As with torch, the mean over no token is nan, the sum 0, and gradients are zero.

    Numerics: logits have the dtype ``nn.Linear`` would give them, the autocast dtype
    where autocast is on; softmax and sums over tiles are fp32. Every sum has a fixed
    order: a function of the shapes, chunk sizes and device.

    Temporaries, in bytes. T tokens, D features, V rows; t = token_chunk and v =
    vocab_chunk, at most T and V; c, h, w: element sizes of logits, hidden, weight::

        tile(rows) = c t rows + (max(4 b rows, 8 D) if c < 4)
            b = tokens of a block: at most t, and 4 b rows <= 16 MiB

        "vocabulary"  forward   tile(v)
                      backward  4 T D + tile(v) + (4 v D if w < 4), then
                                4 T D + (h T D if h < 4)
        "tokens"      forward   h T D + w V D + tile(V)   gradients included

    The weight's gradient, w V D, comes on top of the backward of ``"vocabulary"``;
    vectors, at most 16 T + 40 t bytes (with a bias 16 V more), on top of everything.
    Under autocast add c t D for hidden and c v D (``"tokens"``: c V D) for the weight
    where they are cast. Default sizes: 4 v D and c t v <= 64 MiB; ``"tokens"``:
    c t V <= 256 MiB. docs/losses.md has the reasons.

    Raises ValueError for arguments that do not fit together and, on the CPU, for
    targets out of range (on other devices the check is asynchronous), RuntimeError in
    a backward with ``create_graph=True``.
    """
    objective = _objective(ignore_index, label_smoothing, z_loss, reduction)
    _check_chunks(chunking, token_chunk, vocab_chunk, reduction)

    def of_tensors(hidden: Tensor) -> Tensor:
        return shaped(
            _of_tensors(
                *(hidden, weight, targets, bias, objective),
                *(chunking, token_chunk, vocab_chunk),
            )[0]
        )

    def shaped(loss: Tensor) -> Tensor:
        return loss.view(targets.shape) if reduction == "none" else loss

    if (head := _sharded_head(weight)) is not None and bias is None:
        state = unit_state(head)
        assert state is not None
        if chunking == "vocabulary" and can_stream(state):
            return shaped(
                _of_sharded_rows(
                    state, hidden, targets, objective, token_chunk, vocab_chunk
                )[0]
            )
        return gathered_whole(state, head, hidden, of_tensors)
    return of_tensors(hidden)


def loss_and_sums(
    hidden: Tensor,
    weight: Tensor | nn.Linear,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`linear_cross_entropy` by ``"vocabulary"`` of tensors, or of a unit whose
    rows are streamed, and `Saved`: what is computed of its ``total`` shares the loss's
    backward."""
    objective = _objective(ignore_index, label_smoothing, 0.0, reduction)
    if (head := _sharded_head(weight)) is None:
        loss, top, total = _of_tensors(
            hidden, weight, targets, bias, objective, "vocabulary", None, None
        )
        return loss, top, total
    state = unit_state(head)
    assert state is not None
    loss, saved = _of_sharded_rows(state, hidden, targets, objective, None, None)
    return loss, *saved


def _of_tensors(
    hidden: Tensor,
    weight: Tensor | nn.Linear,
    targets: Tensor,
    bias: Tensor | None,
    objective: Objective,
    chunking: str,
    token_chunk: int | None,
    vocab_chunk: int | None,
) -> tuple[Tensor, ...]:
    """The loss, and by ``"vocabulary"`` `Saved`."""
    weight, bias = _weight_and_bias(weight, bias)
    _check_tensors(hidden, weight, targets, bias)
    flat = hidden.reshape(-1, hidden.shape[-1])
    inputs = (flat, weight, bias, targets.reshape(-1))
    settings = (
        _compute_dtype(hidden, weight.dtype),
        objective.ignore_index,
        objective.label_smoothing,
        objective.z_loss,
        objective.reduction,
        token_chunk,
    )
    if chunking == "vocabulary":
        return loss_by_vocabulary(*inputs, *settings, vocab_chunk)
    grad = torch.is_grad_enabled()
    needs = (grad and t is not None and t.requires_grad for t in inputs[:3])
    return loss_by_tokens(*inputs, *settings, *needs)[:1]


def _sharded_head(weight: Tensor | nn.Linear) -> nn.Linear | None:
    """A linear layer that is a unit of its own and not gathered at the moment."""
    if not isinstance(weight, nn.Linear) or not isinstance(weight.weight, DTensor):
        return None
    state = unit_state(weight)
    return weight if state is not None and state.modules == (weight,) else None


def _of_sharded_rows(
    state: UnitState,
    hidden: Tensor,
    targets: Tensor,
    objective: Objective,
    token_chunk: int | None,
    vocab_chunk: int | None,
) -> tuple[Tensor, Saved]:
    parameter = state.parameters[0].shard
    recorded = torch.is_grad_enabled() and (
        hidden.requires_grad or parameter.requires_grad
    )
    rows = ShardedRows(state, recorded)
    if vocab_chunk is not None:
        raise _error(
            "vocab_chunk",
            "None for a head whose rows are streamed",
            vocab_chunk,
            f"A chunk is {rows.chunks[0].num_rows} rows: what fits a slot of the "
            "gradient ring",
        )
    if state.policy.cast_forward_inputs and hidden.is_floating_point():
        hidden = hidden.to(rows.compute_dtype)
    # The shard may be on the host, its rows are not.
    _check_devices(hidden, {"targets": targets.device, "weight": state.device})
    _check_shapes(hidden, parameter, targets, None)
    if _compute_dtype(hidden, rows.compute_dtype) != rows.compute_dtype:
        rule = f"no autocast, or autocast to the unit's {rows.compute_dtype}"
        got = torch.get_autocast_dtype(hidden.device.type)
        raise _error("hidden", rule, got, "Leave autocast for the loss")
    flat = hidden.reshape(-1, hidden.shape[-1])
    return loss_of_rows(
        flat, parameter, None, targets.reshape(-1), rows, objective, token_chunk
    )


def _weight_and_bias(
    weight: Tensor | nn.Linear, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if not isinstance(weight, nn.Module):
        return weight, bias
    head = weight
    if not isinstance(head, nn.Linear) or has_own_forward(head):
        raise _error(
            "weight",
            "a tensor, or an nn.Linear with its class's forward",
            class_name(head),
            "Pass its weight",
        )
    if bias is not None:
        raise _error(
            "bias", "None with an nn.Linear", "a tensor", "Pass head.weight instead"
        )
    hooks = (*head._forward_hooks.values(), *head._forward_pre_hooks.values())
    if hooks and not isinstance(head, FSDPModule):
        raise _error(
            "weight",
            "an nn.Linear without forward hooks, which would not run",
            f"{len(hooks)}",
            "Pass head.weight, or remove the hooks",
        )
    return head.weight, head.bias


def _check_tensors(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> None:
    given = {"hidden": hidden, "weight": weight, "targets": targets}
    if bias is not None:
        given["bias"] = bias
    for name, tensor in given.items():
        if isinstance(tensor, DTensor):
            raise _error(
                name,
                "a plain tensor",
                f"a DTensor {list(tensor.shape)} placed as {tensor.placements}",
                "Call the loss inside the forward of the head's unit, or unshard() "
                "the unit first",
            )
    _check_devices(hidden, {name: tensor.device for name, tensor in given.items()})
    _check_shapes(hidden, weight, targets, bias)


def _check_devices(hidden: Tensor, devices: dict[str, torch.device]) -> None:
    for name, device in devices.items():
        if device != hidden.device:
            raise _error(name, f"device {hidden.device}", device, "Move it")


def _check_shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> None:
    given = {"hidden": hidden, "weight": weight, "targets": targets}
    if bias is not None:
        given["bias"] = bias
    if hidden.dim() < 1:
        raise _error("hidden", "shape [..., features]", list(hidden.shape), "Unsqueeze")
    features = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != features or weight.shape[0] < 1:
        rule = f"shape [vocabulary >= 1, {features}] (hidden is {list(hidden.shape)})"
        raise _error("weight", rule, list(weight.shape), "Transpose it if needed")
    if bias is not None and bias.shape != weight.shape[:1]:
        rule = f"shape {list(weight.shape[:1])}"
        raise _error("bias", rule, list(bias.shape), "Pass one number per class")
    if targets.shape != hidden.shape[:-1]:
        rule = f"shape {list(hidden.shape[:-1])} (hidden is {list(hidden.shape)})"
        raise _error("targets", rule, list(targets.shape), "Pass one class per token")
    if targets.dtype != torch.int64:
        raise _error("targets", "int64 class indices", targets.dtype, "Cast them")
    for name, tensor in given.items():
        if name != "targets" and tensor.dtype not in _DTYPES:
            rule = f"one of {', '.join(map(str, _DTYPES))}"
            raise _error(name, rule, tensor.dtype, "Cast it")


def _compute_dtype(hidden: Tensor, weight: torch.dtype) -> torch.dtype:
    """The dtype of the logits. Autocast leaves fp64 alone."""
    device, both = hidden.device.type, (hidden.dtype, weight)
    if torch.is_autocast_enabled(device) and torch.float64 not in both:
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight:
        rule = f"hidden's dtype {hidden.dtype}"
        raise _error("weight", rule, weight, "Cast one of them, or use autocast")
    return hidden.dtype


def _objective(
    ignore_index: int, label_smoothing: float, z_loss: float, reduction: str
) -> Objective:
    if not 0.0 <= label_smoothing <= 1.0:
        raise _error("label_smoothing", "a number in [0, 1]", label_smoothing)
    if not z_loss >= 0.0:
        raise _error("z_loss", "a number >= 0", z_loss)
    if reduction not in ("mean", "sum", "none"):
        raise _error("reduction", "'mean', 'sum' or 'none'", repr(reduction))
    return Objective(ignore_index, float(label_smoothing), float(z_loss), reduction)


def _check_chunks(
    chunking: str, token_chunk: int | None, vocab_chunk: int | None, reduction: str
) -> None:
    if chunking not in ("vocabulary", "tokens"):
        raise _error("chunking", "'vocabulary' or 'tokens'", repr(chunking))
    if chunking == "tokens" and vocab_chunk is not None:
        rule = "None with chunking='tokens', which has the whole vocabulary in a tile"
        raise _error("vocab_chunk", rule, vocab_chunk, "Choose chunking='vocabulary'")
    if chunking == "tokens" and reduction == "none":
        rule = "'mean' or 'sum' with chunking='tokens', whose forward has the gradients"
        raise _error("reduction", rule, "'none'", "Choose chunking='vocabulary'")
    for name, size in (("token_chunk", token_chunk), ("vocab_chunk", vocab_chunk)):
        if size is not None and size < 1:
            raise _error(name, "at least 1, or None for the default", size)


def _error(
    what: str, rule: str, got: object, step: str = "See its documentation"
) -> ValueError:
    return ValueError(
        f"lowtide: linear_cross_entropy: {what}: expected {rule}, got {got}. {step}."
    )
