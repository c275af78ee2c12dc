"""What makes a parameter of a tensor subclass other than a plain one."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# FSDP2's names for the hooks of an all-gather extension.
PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
# FSDP2 has it since torch 2.15, and it is optional: whether what was gathered is over
# when the second hook returns.
RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
# Subclasses that stand for the plain tensor they will be.
_TRANSPARENT = (FakeTensor, AsyncCollectiveTensor)


def is_extended(tensor: Tensor) -> bool:
    """Whether copying the bytes of ``tensor``, of one rank or not yet sharded, would
    lose what it is: a subclass, or one with hooks of its own. A subclass whose results
    are plain, as that of a ``Parameter``, ends with the first operator."""
    if any(hasattr(tensor, hook) for hook in (PRE, POST, RELEASES)):
        return True
    detached = tensor.detach()
    return type(detached) is not Tensor and not isinstance(detached, _TRANSPARENT)


def extended_class(tensor: Tensor) -> type[Tensor] | None:
    return type(tensor) if is_extended(tensor) else None


def versions_of(tensor: Tensor) -> list[int]:
    """Of it and of the tensors that it is made of, which in-place writes change."""
    versions = [0 if tensor.is_inference() else tensor._version]
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            versions += versions_of(getattr(tensor, name))
    return versions


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Itself, or those that a subclass is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(tensor, name))


def made_of(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``function`` makes of it, or of the plain tensors of a subclass, which is
    made of them again: few have operators for it."""
    if not is_traceable_wrapper_subclass(tensor):
        return function(tensor)
    names, metadata = tensor.__tensor_flatten__()
    parts = {name: made_of(getattr(tensor, name), function) for name in names}
    made: Tensor = type(tensor).__tensor_unflatten__(
        parts, metadata, tensor.size(), tensor.stride()
    )
    return made


def require_both_hooks(tensor: Tensor, who: str) -> None:
    """Neither may still come: they can be set on the sharded tensor, as FSDP2 allows,
    and are asked for in the first forward."""
    if hasattr(tensor, PRE) != hasattr(tensor, POST):
        there, lacking = (PRE, POST) if hasattr(tensor, PRE) else (POST, PRE)
        raise ValueError(
            f"lowtide: {who}: expected {PRE} and {POST}, got a "
            f"{type(tensor).__name__} with {there} alone. Define {lacking}, too."
        )
    if hasattr(tensor, RELEASES) and not hasattr(tensor, POST):
        raise ValueError(
            f"lowtide: {who}: expected {PRE} and {POST} where {RELEASES} is, got a "
            f"{type(tensor).__name__} with that alone. Define both, too."
        )


def releases(tensor: Tensor, who: str) -> bool:
    """Whether nothing reads what was gathered for it behind the second hook."""
    if not hasattr(tensor, RELEASES):
        return False
    answer = getattr(tensor, RELEASES)()
    if not isinstance(answer, bool):
        raise ValueError(
            f"lowtide: {who}: expected {type(tensor).__name__}.{RELEASES} to return a "
            f"bool, got {type(answer).__name__}. Return True or False."
        )
    return answer


def require_hooks(tensor: Tensor, who: str) -> None:
    require_both_hooks(tensor, who)
    if not hasattr(tensor, PRE):
        raise NotImplementedError(
            f"lowtide: {who}: expected a plain tensor, or a subclass that defines "
            f"{PRE} and {POST}, got a {type(tensor).__name__}, of which a gather "
            "would leave a plain tensor. Define both (FSDP2's all-gather extensions), "
            "or convert the parameter before fully_shard."
        )


def shard_of_subclass(
    data: Tensor, world_size: int, rank: int, dim: int, who: str
) -> Tensor:
    """This rank's rows, with the operators that FSDP2 uses and nothing else, because a
    subclass defines those. Behind them zeros, up to what the first rank has."""
    try:
        chunks = torch.chunk(data, world_size, dim=dim)
        padded = data.new_zeros(chunks[0].size())
        length = chunks[rank].size(dim) if rank < len(chunks) else 0
        local = padded.narrow(dim, 0, length)
        if length > 0:
            local.copy_(chunks[rank])
    except NotImplementedError as error:
        raise NotImplementedError(
            f"lowtide: {who}: expected a {type(data).__name__} that can be split, as "
            f"FSDP2 splits it, got: {error}. Pass it in ignored_params, which leaves "
            "it whole on every rank, or convert it to NF4, say."
        ) from error
    return local


def plain_gradient(gradient: Tensor) -> Tensor:
    """What a subclass writes into a plain tensor, as FSDP2's copies do."""
    if type(gradient) is Tensor or isinstance(gradient, _TRANSPARENT):
        return gradient
    plain = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return plain.copy_(gradient)
