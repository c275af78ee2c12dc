"""Stub of the simulated accelerator's extension; csrc/phantom/python holds the
bindings."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

class AllocatorSettings:
    """Settings of PYTORCH_ALLOC_CONF, in bytes; csrc/phantom/allocator/settings.h."""

    expandable: bool
    capacity: int | None
    memory_fraction: float
    garbage_collection_threshold: float
    max_split: int | None
    large_segment: int
    max_non_split_rounding: int | None
    roundup_power2_divisions: Sequence[int]
    def __init__(self) -> None: ...

class CachingAllocator:
    """The model alone; :class:`lowtide.phantom.AllocatorModel` is its face."""

    def __init__(self, settings: AllocatorSettings, events: str) -> None: ...
    def malloc(self, num_bytes: int, stream: int) -> int: ...
    def free(self, address: int) -> None: ...
    def record_stream(self, address: int, stream: int) -> None: ...
    def synchronize(self, stream: int | None) -> None: ...
    def empty_cache(self) -> None: ...
    def settings(self) -> AllocatorSettings: ...
    def set_expandable(self, expandable: bool) -> None: ...
    def set_memory_fraction(self, fraction: float) -> None: ...
    def allocated(self) -> int: ...
    def reserved(self) -> int: ...
    def block_size(self, address: int) -> int: ...
    def statistics(self) -> dict[str, Any]:
        """torch.cuda.memory_stats_as_nested_dict()."""
    def reset_peak_statistics(self) -> None: ...
    def reset_accumulated_statistics(self) -> None: ...
    def snapshot(self) -> list[dict[str, Any]]:
        """torch.cuda.memory_snapshot() without call stacks."""
    def record_history(self, max_entries: int) -> None: ...
    def history(self) -> list[tuple[str, int, int, int]]:
        """(action, address, bytes, stream) per entry."""

# -- the device ---------------------------------------------------------------------

HOPPER_CUBLAS_WORKSPACE: int
CUBLASLT_WORKSPACE: int

def install(
    *,
    mode: str,
    settings: AllocatorSettings,
    events: str,
    cublas_workspace: int,
    cublaslt_workspace: int,
    allowed_operators: Sequence[str],
) -> None: ...
def mode() -> str:
    """Of the installed device."""

def events() -> str:
    """Of the installed device."""

def device_memory() -> CachingAllocator:
    """Of the installed device."""

def set_allocation_listener(
    listener: Callable[[int, int, int, str], None] | None,
) -> None:
    """Called after every allocation with address, bytes, stream and operator."""

def default_generator() -> torch.Generator: ...
def cublas_workspace_bytes(config: str) -> int: ...
def clear_cublas_workspaces() -> None: ...
def listed_operators() -> dict[str, str]:
    """Name in namespace aten, without overload and in-place underscore, to memory."""

def operator_memory(name: str, overload: str) -> str | None:
    """How the operator list has it; None if it does not."""

class GlooBackend:
    """Collectives of phantom tensors over gloo."""

    def __init__(self, gloo: Any) -> None: ...

class FakeGroup:
    """torch's fake group, which tells the timeline."""

    def __init__(self, rank: int, size: int, ranks: Sequence[int]) -> None: ...

# -- time ---------------------------------------------------------------------------

class Accelerator:
    """csrc/phantom/time/machine.h; :mod:`lowtide.phantom.machines` has figures."""

    peak_flops: Sequence[float]
    memory_bandwidth: float
    product_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    kernel_floor: float
    host_bandwidth: float
    def __init__(self) -> None: ...

class Protocol:
    """csrc/phantom/time/machine.h."""

    base_latency: float
    hop_in_node: float
    hop_beside_network: float
    hop_between_nodes: float
    share_in_node: float
    share_between_nodes: float
    most: Sequence[float]
    def __init__(self) -> None: ...

class Network:
    """csrc/phantom/time/machine.h."""

    bandwidth_in_node: float
    bandwidth_between_nodes: float
    ranks_per_node: int
    rings: Sequence[Protocol]
    trees: Sequence[Protocol]
    def __init__(self) -> None: ...

class Timeline:
    """What a device did, and when; in seconds."""

    def spans(
        self,
    ) -> list[tuple[str, int, float, float, float, str, float, float]]:
        """(kind, stream, begin, end, issued, name, flops, bytes) each."""
    def marks(self) -> list[tuple[str, float]]:
        """(phase, begin) each."""
    def usage(self, begin: float, end: float) -> dict[str, float]:
        """csrc/phantom/time/exposure.h."""

def start_timeline(
    accelerator: Accelerator, network: Network, issue_cost: float
) -> None: ...
def stop_timeline() -> Timeline: ...
def mark_phase(phase: str) -> None:
    """On the compute stream; nothing while no timeline runs."""

def time_on_device() -> float:
    """Seconds until what was issued on the compute stream is done."""
