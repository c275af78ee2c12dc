"""The caching allocator of ``torch.cuda`` as a model: sizes and addresses only."""

from collections.abc import Sequence
from typing import Any, Literal

from lowtide import _phantom

Entry = tuple[str, int, int, int]  # action, address, bytes, stream


class AllocatorModel:
    """CUDACachingAllocator of torch 2.11 for one device.

    Makes the decisions of the real one (pools, splits, segments, retries, statistics)
    for the calls it is given, so ``reserved`` is what a GPU would reserve. Thread-safe.

    ``expandable``, ``max_split``, ``large_segment``, ``max_non_split_rounding``,
    ``roundup_power2_divisions``, ``garbage_collection_threshold`` and
    ``memory_fraction`` are the settings of ``PYTORCH_ALLOC_CONF``, sizes in bytes;
    :func:`lowtide.phantom.alloc_conf.parse` reads such a string.
    ``roundup_power2_divisions`` is one value, or sixteen for requests from 1, 2, 4, ...
    32768 MiB on. ``capacity`` is what the device can give, in bytes; None: no limit.

    ``events`` says when work of other streams is over: ``"immediate"`` (the device is
    never behind, the lower bound of what is reserved) or ``"at_sync"`` (only when the
    host waits, the upper bound).

    Raises ValueError for settings that torch refuses.
    """

    def __init__(
        self,
        *,
        expandable: bool = False,
        capacity: int | None = None,
        max_split: int | None = None,
        roundup_power2_divisions: int | Sequence[int] | None = None,
        events: Literal["immediate", "at_sync"] = "immediate",
        memory_fraction: float = 1.0,
        garbage_collection_threshold: float = 0.0,
        large_segment: int = 20 << 20,
        max_non_split_rounding: int | None = None,
    ) -> None:
        settings = _phantom.AllocatorSettings()
        settings.expandable = expandable
        settings.capacity = capacity
        settings.max_split = max_split
        settings.memory_fraction = memory_fraction
        settings.garbage_collection_threshold = garbage_collection_threshold
        settings.large_segment = large_segment
        settings.max_non_split_rounding = max_non_split_rounding
        if isinstance(roundup_power2_divisions, int):
            settings.roundup_power2_divisions = [roundup_power2_divisions] * 16
        elif roundup_power2_divisions is not None:
            settings.roundup_power2_divisions = roundup_power2_divisions
        self._model = _phantom.CachingAllocator(settings, events)
        self._events = events

    @classmethod
    def of_device(cls) -> "AllocatorModel":
        """That of the installed phantom device. Raises RuntimeError without one."""
        model = cls.__new__(cls)
        model._model = _phantom.device_memory()
        events = _phantom.events()
        model._events = "immediate" if events == "immediate" else "at_sync"
        return model

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """A handle, the block's simulated address, for ``nbytes`` used on ``stream``;
        0 for no bytes.

        Raises torch.OutOfMemoryError if the device is full; the cache is flushed then.
        """
        return self._model.malloc(nbytes, stream)

    def free(self, handle: int) -> None:
        """Raises ValueError unless ``handle`` is live."""
        self._model.free(handle)

    def record_stream(self, handle: int, stream: int) -> None:
        """``stream`` uses the block too: freed, it waits for that stream."""
        self._model.record_stream(handle, stream)

    def synchronize(self, stream: int | None = None) -> None:
        """The host waits for ``stream``, or for the device."""
        self._model.synchronize(stream)

    def empty_cache(self) -> None:
        """Returns every unused segment, or page of an expandable one, to the device."""
        self._model.empty_cache()

    @property
    def allocated(self) -> int:
        """Bytes in live blocks, rounded as the allocator does."""
        return self._model.allocated()

    @property
    def reserved(self) -> int:
        """Bytes taken from the device."""
        return self._model.reserved()

    def size_of(self, handle: int) -> int:
        """Bytes of the block behind ``handle``, at least what was asked for."""
        return self._model.block_size(handle)

    def stats(self) -> dict[str, int]:
        """``torch.cuda.memory_stats()``: the same keys, in the same order."""
        flat: dict[str, int] = {}
        _flatten("", self._model.statistics(), flat)
        return dict(sorted(flat.items()))

    def reset_peak_stats(self) -> None:
        self._model.reset_peak_statistics()

    def reset_accumulated_stats(self) -> None:
        self._model.reset_accumulated_statistics()

    def snapshot(self) -> list[dict[str, Any]]:
        """``torch.cuda.memory_snapshot()``: segments and blocks by address."""
        return self._model.snapshot()

    def record_history(self, max_entries: int) -> None:
        """Keeps the last ``max_entries`` entries from now on; 0 stops and forgets."""
        self._model.record_history(max_entries)

    def history(self) -> list[Entry]:
        """(action, address, bytes, stream) per entry: torch's own actions, and
        ``record_stream``, ``synchronize_stream``, ``synchronize_device`` and
        ``empty_cache``, which torch does not log."""
        return self._model.history()

    def set_expandable(self, expandable: bool) -> None:
        """For segments from now on; those that exist stay what they are."""
        self._model.set_expandable(expandable)

    def set_memory_fraction(self, fraction: float) -> None:
        """The share of ``capacity`` that may be reserved."""
        self._model.set_memory_fraction(fraction)

    def settings(self) -> dict[str, Any]:
        """The keywords this model was made with."""
        names = (
            *("expandable", "capacity", "memory_fraction", "max_split"),
            *("garbage_collection_threshold", "large_segment"),
            *("max_non_split_rounding", "roundup_power2_divisions"),
        )
        current = self._model.settings()
        return {name: getattr(current, name) for name in names} | {
            "events": self._events
        }


def _flatten(prefix: str, value: dict[str, Any], flat: dict[str, int]) -> None:
    for key, inner in value.items():
        if isinstance(inner, dict):
            _flatten(f"{prefix}{key}.", inner, flat)
        else:
            flat[prefix + key] = inner
