"""What differs between the versions of torch that lowtide runs on, by meaning: no other
module asks for torch's version."""

import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

# Whether the casts of `fully_shard([a, b])` are of every module's inputs and outputs,
# or of the first one's inputs and the last one's outputs.
CASTS_EACH_OF_A_LIST = VERSION >= (2, 15)


def default_reduce_dtype(storage: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """In which FSDP2 reduces the gradients of a parameter whose policy does not say:
    the dtype they are computed in, from 2.15 on the parameter's own."""
    return storage if VERSION >= (2, 15) else compute
