"""Makes the phantom device part of this process's torch."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from lowtide import _phantom
from lowtide.phantom import device_module
from lowtide.phantom.allocator import AllocatorModel


def install(
    mode: Literal["meta", "exact"] = "meta",
    capacity: int | None = None,
    expandable: bool = False,
    *,
    max_split: int | None = None,
    roundup_power2_divisions: int | Sequence[int] | None = None,
    memory_fraction: float = 1.0,
    garbage_collection_threshold: float = 0.0,
    large_segment: int = 20 << 20,
    max_non_split_rounding: int | None = None,
    events: Literal["immediate", "at_sync"] = "immediate",
    cublas_workspace: int | None = None,
    allow: Sequence[str] = (),
) -> None:
    """Adds the device ``phantom`` to torch: unmodified programs run on it without a
    GPU, and ``torch.accelerator`` reports the memory that CUDA's allocator would.

    Once per process, before its first backward, for then autograd starts its threads.

    Args:
        mode: ``"exact"`` computes every operator on the CPU, with the CPU's results;
            ``"meta"`` computes nothing and holds no bytes, so a model of any size
            fits. Values read back in meta mode are 1, or False for booleans.
        capacity: Bytes the device has; beyond them allocations raise
            ``torch.OutOfMemoryError``. None: no limit.
        expandable, max_split, roundup_power2_divisions, memory_fraction,
            garbage_collection_threshold, large_segment, max_non_split_rounding,
            events: As for
            :class:`lowtide.phantom.AllocatorModel`.
        cublas_workspace: Bytes of each cuBLAS workspace, 0 for none, of cuBLASLt
            neither. None: what ``CUBLAS_WORKSPACE_CONFIG`` says, else 32 MiB as on
            Hopper and Blackwell; for cuBLASLt ``CUBLASLT_WORKSPACE_SIZE``, else 1 MiB.
        allow: Operators, ``"aten::foo"``, that meta mode runs although their memory on
            CUDA was not reviewed; their outputs are counted.

    Raises:
        RuntimeError: When a device is installed already, or a backward has run.
        ValueError: For settings that torch refuses.
    """
    checked = AllocatorModel(
        expandable=expandable,
        capacity=capacity,
        max_split=max_split,
        roundup_power2_divisions=roundup_power2_divisions,
        memory_fraction=memory_fraction,
        garbage_collection_threshold=garbage_collection_threshold,
        large_segment=large_segment,
        max_non_split_rounding=max_non_split_rounding,
    )
    _phantom.install(
        mode=mode,
        settings=checked._model.settings(),
        events=events,
        **_workspaces(cublas_workspace),
        allowed_operators=list(allow),
    )
    if mode == "meta":
        _print_without_values()
    torch.utils.rename_privateuse1_backend("phantom")
    torch._register_device_module("phantom", device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _workspaces(cublas: int | None) -> dict[str, int]:
    """As torch's CUDA would read the environment."""
    if cublas == 0:
        return {"cublas_workspace": 0, "cublaslt_workspace": 0}
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if cublas is None and config is not None:
        cublas = _phantom.cublas_workspace_bytes(config)
    lt_kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE")
    return {
        "cublas_workspace": cublas or _phantom.HOPPER_CUBLAS_WORKSPACE,
        "cublaslt_workspace": (
            _phantom.CUBLASLT_WORKSPACE if lt_kib is None else int(lt_kib) << 10
        ),
    }


def _print_without_values() -> None:
    """Tensors without bytes print as ``tensor(..., device='phantom:0')``; to choose a
    number format torch would select elements by value."""
    print_tensor: Callable[..., str] = torch.Tensor.__repr__

    def print_shape(self: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        if tensor_contents is None and self.device.type == "phantom":
            tensor_contents = f"..., size={tuple(self.shape)}"
        return print_tensor(self, tensor_contents=tensor_contents)

    functools.update_wrapper(print_shape, print_tensor)
    torch.Tensor.__repr__ = print_shape  # type: ignore[assignment]
