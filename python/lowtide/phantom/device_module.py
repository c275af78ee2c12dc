"""``torch.phantom``: what ``torch.cuda`` is for CUDA, as far as torch and training
programs ask for it."""

import contextlib
from types import TracebackType
from typing import Any

import torch
from torch import accelerator

from lowtide import _phantom

Device = torch.device | str | int | None

empty_cache = accelerator.empty_cache
max_memory_allocated = accelerator.max_memory_allocated
max_memory_reserved = accelerator.max_memory_reserved
mem_get_info = accelerator.get_memory_info
memory_allocated = accelerator.memory_allocated
memory_reserved = accelerator.memory_reserved
memory_stats = accelerator.memory_stats
reset_accumulated_memory_stats = accelerator.reset_accumulated_memory_stats
reset_peak_memory_stats = accelerator.reset_peak_memory_stats
set_stream = accelerator.set_stream


def init() -> None:
    """Nothing to do: installing the device initialised it."""


_lazy_init = init


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def keeps_time() -> bool:
    """Whether a timeline runs: events have times of the device, not the host's."""
    return _phantom.time_on_device() > 0


def _is_in_bad_fork() -> bool:
    return False


# -- devices ----------------------------------------------------------------------


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Device) -> None:
    """Raises ValueError for any other than the one there is."""
    accelerator.set_device_index(_index(device))


class device:
    """The device of a ``with`` block: there is only one."""

    def __init__(self, device: Device) -> None:
        set_device(device)

    def __enter__(self) -> "device":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


def device_of(tensor: torch.Tensor) -> "device":
    return device(tensor.device if tensor.device.type == "phantom" else None)


def _index(device: Device) -> int:
    if device is None:
        return 0
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return 0 if index is None else index


# -- streams and events -------------------------------------------------------------


class Stream(torch.Stream):
    """A stream of the device's pool; negative priorities have a pool of their own."""

    def __new__(
        cls, device: Device = None, priority: int = 0, **kwargs: Any
    ) -> "Stream":
        return super().__new__(cls, device="phantom", priority=priority, **kwargs)


class Event(torch.Event):
    """Makes a ``torch.Event``: ``elapsed_time`` takes no subclass."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, **kwargs: Any
    ) -> torch.Event:
        return torch.Event(
            "phantom", enable_timing=enable_timing, blocking=blocking, **kwargs
        )


def current_stream(device: Device = None) -> torch.Stream:
    return accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> torch.Stream:
    device_type = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=0, device_index=0, device_type=device_type)


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Makes ``stream`` the current one in a ``with`` block; None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream


def synchronize(device: Device = None) -> None:
    accelerator.synchronize(_index(device))


# -- random numbers -------------------------------------------------------------------


def default_generator() -> torch.Generator:
    return _phantom.default_generator()


def initial_seed() -> int:
    return default_generator().initial_seed()


def manual_seed(seed: int) -> None:
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def seed() -> None:
    default_generator().seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    """16 bytes: seed and offset, as on CUDA."""
    return default_generator().get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    default_generator().set_state(new_state)


# -- memory and dtypes ----------------------------------------------------------------


def memory_snapshot() -> list[dict[str, Any]]:
    """``torch.cuda.memory_snapshot()``: segments and blocks by address."""
    return _phantom.device_memory().snapshot()


def clear_cublas_workspaces() -> None:
    """``torch._C._cuda_clearCublasWorkspaces()``."""
    _phantom.clear_cublas_workspaces()


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
