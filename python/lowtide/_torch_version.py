"""What differs between the versions of torch that lowtide runs on, by meaning: no other
module asks for torch's version."""

import torch

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def default_reduce_dtype(storage: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """In which FSDP2 reduces the gradients of a parameter whose policy does not say:
    the dtype they are computed in, from 2.15 on the parameter's own."""
    return storage if _VERSION >= (2, 15) else compute
