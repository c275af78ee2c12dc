"""What differs between the versions of torch that lowtide runs on, by meaning: no other
module asks for torch's version."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.distributed.tensor import Shard

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

# Whether the casts of `fully_shard([a, b])` are of every module's inputs and outputs,
# or of the first one's inputs and the last one's outputs.
CASTS_EACH_OF_A_LIST = VERSION >= (2, 13)

# Whether FSDP2 stores parameters that `spmd_types` knows the types of as DTensors, and
# refuses them without `dp_mesh_dims`.
STORES_ANNOTATED = VERSION >= (2, 15)

# torch.distributed's collectives on one tensor a rank, under the names of 2.13, where
# the ones before give a FutureWarning.
_c10d: Any = dist
if VERSION >= (2, 13):
    all_gather_single = _c10d.all_gather_single
    reduce_scatter_single = _c10d.reduce_scatter_single
else:
    all_gather_single = _c10d.all_gather_into_tensor
    reduce_scatter_single = _c10d.reduce_scatter_tensor


if VERSION >= (2, 12):
    from torch.distributed.fsdp import DataParallelMeshDims
else:

    @dataclasses.dataclass
    class DataParallelMeshDims:  # type: ignore[no-redef]
        """torch 2.12's: the names of the dimensions of a mesh to shard over, several
        of which are flattened, and of those to replicate over."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError(
                    "lowtide: DataParallelMeshDims: expected names of dimensions, got "
                    "none. Pass shard='dp', say."
                )

        @property
        def shard_names(self) -> tuple[str, ...]:
            return self._names(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            return self._names(self.replicate)

        @staticmethod
        def _names(named: str | tuple[str, ...] | None) -> tuple[str, ...]:
            return (named,) if isinstance(named, str) else tuple(named or ())


if VERSION >= (2, 12):
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
else:

    @dataclasses.dataclass
    class ShardPlacementResult:  # type: ignore[no-redef]
        """torch 2.12's, what a ``shard_placement_fn`` may return: the dimension to
        split, ``Shard(0)`` if None, and the mesh to split it over: torch's
        ``FSDPMeshInfo`` or ``HSDPMeshInfo``, or a ``DeviceMesh``."""

        placement: Shard | None
        mesh_info: Any


if VERSION >= (2, 15):
    from torch.distributed.fsdp import GradientReductionHandle
else:

    class GradientReductionHandle:  # type: ignore[no-redef]
        """torch 2.15's, what ``finalize_backward(async_op=True)`` returns."""

        def wait(self) -> None:
            """Waits until the gradients are reduced."""


_Override = Callable[[torch.nn.Parameter], torch.dtype | None] | None
_OVERRIDE = "param_dtype_override_fn"

if VERSION >= (2, 15):
    from torch.distributed.fsdp import MixedPrecisionPolicy
else:

    @dataclasses.dataclass(frozen=True)
    class MixedPrecisionPolicy(TorchPrecision):  # type: ignore[no-redef]
        """torch's, with a field of torch 2.15's: the dtype that a parameter is
        computed with, its own or ``param_dtype``; None is that of ``param_dtype``."""

        param_dtype_override_fn: _Override = dataclasses.field(
            default=None, kw_only=True
        )


def dtype_override(policy: TorchPrecision) -> _Override:
    """The policy's ``param_dtype_override_fn``, if it has one: before 2.15 torch's own
    has none."""
    return getattr(policy, _OVERRIDE, None)


def without_dtype_override(policy: TorchPrecision) -> TorchPrecision:
    """The policy of parameters of which ``param_dtype_override_fn`` says nothing."""
    names = {field.name for field in dataclasses.fields(policy)} & {_OVERRIDE}
    changes: dict[str, Any] = dict.fromkeys(names)
    return dataclasses.replace(policy, **changes)


def default_reduce_dtype(storage: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """In which FSDP2 reduces the gradients of a parameter whose policy does not say:
    the dtype they are computed in, from 2.15 on the parameter's own."""
    return storage if VERSION >= (2, 15) else compute


def gradient_as_computed(
    compute: torch.dtype, reduce: torch.dtype, *, summed_before: bool
) -> bool:
    """Whether FSDP2 lets autograd leave the gradient of a gathered parameter in the
    dtype it was computed in: from 2.15 on where it is reduced in a wider one, and other
    ranks' are not added before (``summed_before``)."""
    wider = reduce.itemsize > compute.itemsize
    return VERSION >= (2, 15) and wider and not summed_before


def set_gradient_dtype(
    full: torch.Tensor, arriving: torch.dtype, *, as_computed: bool, chosen: bool
) -> None:
    """Which dtype ``.grad`` of FSDP2's gathered parameter has: its own; from 2.15 on,
    and where the program chose one, ``arriving``, or any (``as_computed``)."""
    if (VERSION >= (2, 15) or chosen) and full.is_floating_point():
        full.grad_dtype = None if as_computed else arriving


# Of a parameter whose `grad_dtype` nobody has set: `.grad` has the parameter's dtype.
OWN: Final = "own"
GradDtype = torch.dtype | None | Literal["own"]


def chosen_grad_dtype(parameter: torch.Tensor) -> GradDtype:
    """What a program has set a parameter's ``grad_dtype`` to: None is any. Before 2.15
    torch does not tell the parameter's own dtype from none set."""
    with torch._C.DisableTorchFunctionSubclass():
        dtype = parameter.grad_dtype
        differs = dtype != parameter.dtype
        chosen = getattr(parameter, "_has_grad_dtype_override", differs)
    return dtype if chosen else OWN
