"""From an allocator's history to a trace: the model's, or that of a real CUDA run.

On a machine with a GPU::

    torch.cuda.memory._record_memory_history(max_entries=10**7, context=None)
    ...                                     # before the first CUDA allocation
    torch.cuda.synchronize()
    trace_of_cuda(torch.cuda.memory._snapshot()).write("run.jsonl")

and anywhere ``replay(Trace.read("run.jsonl")).differences`` lists where the model
reserves something else.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from lowtide.phantom import alloc_conf
from lowtide.phantom.allocator import AllocatorModel
from lowtide.phantom.traces import Operation, OpName, Trace


def trace_of_model(model: AllocatorModel) -> Trace:
    """What was asked of ``model`` since :meth:`AllocatorModel.record_history`, which
    must have been called before the first allocation.

    Raises ValueError if the history begins later.
    """
    recorder = _Recorder()
    for action, address, size, stream in model.history():
        if action == "record_stream":
            recorder.add("record", address, stream=stream)
        elif action == "synchronize_stream":
            recorder.add("synchronize", stream=stream)
        elif action == "synchronize_device":
            recorder.add("synchronize")
        elif action == "empty_cache":
            recorder.add("empty_cache")
        else:
            recorder.log(action, address, size, stream)
    return Trace(recorder.operations, model.settings())


def trace_of_cuda(
    snapshot: Mapping[str, Any], device: int = 0, *, capacity: int | None = None
) -> Trace:
    """What a CUDA program asked of torch's allocator on ``device``, from
    ``torch.cuda.memory._snapshot()`` of a run whose history was recorded from before
    its first allocation.

    torch logs neither record_stream nor synchronize nor empty_cache; they are deduced.
    A block whose free completed late was recorded on a stream made up for it, which the
    host waited for where the free completed. Segments released before an allocation
    were released by ``empty_cache``, unless the allocation would not have fitted into
    ``capacity`` (bytes the device could give; by default taken from the first
    out-of-memory entry, if there is one).

    Raises ValueError if the history begins late.
    """
    entries = snapshot["device_traces"][device]
    settings = _settings_of(snapshot)
    settings["events"] = "at_sync"
    settings["capacity"] = capacity or _capacity_in(entries)
    recorder = _CudaRecorder(settings)
    recorder.run(entries)
    return Trace(recorder.operations, settings)


def _settings_of(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    reported = snapshot.get("allocator_settings", {})
    return alloc_conf.parse(reported.get("PYTORCH_CUDA_ALLOC_CONF") or "")


def _capacity_in(entries: Iterable[Mapping[str, Any]]) -> int | None:
    reserved = 0
    for entry in entries:
        reserved += _reserved_by(entry)
        if entry["action"] == "oom":
            return reserved + int(entry["device_free"])
    return None


# What an entry's size adds to the reserved bytes.
_SIGN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _reserved_by(entry: Mapping[str, Any]) -> int:
    return _SIGN.get(entry["action"], 0) * int(entry["size"])


class _Recorder:
    """Builds operations from the entries torch and the model share."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.reserved = 0
        self._ids: dict[int, int] = {}  # of live addresses
        self._num_allocations = 0

    def log(self, action: str, address: int, size: int, stream: int) -> None:
        if action == "alloc":
            self._ids[address] = self._num_allocations
            self._num_allocations += 1
            self.add("allocate", address, bytes=size, stream=stream)
        elif action == "oom":
            self.add("allocate", bytes=size, stream=stream, fails=True)
        elif action == "free_requested":
            self.add("free", address)
            del self._ids[address]
        elif action in _SIGN:
            self.reserved += _SIGN[action] * size
            if _SIGN[action] < 0:
                self._update_empty_cache()

    def add(
        self,
        op: OpName,
        address: int | None = None,
        *,
        bytes: int | None = None,
        stream: int | None = None,
        fails: bool = False,
        observed: bool = True,
    ) -> None:
        identity = None if address is None else self._ids.get(address)
        if address is not None and identity is None:
            raise ValueError(
                f"lowtide: history: expected the allocation at {address:#x} before its "
                f"{op}, got a history that begins later. Record from before the first "
                "allocation, with enough entries."
            )
        reserved = self.reserved if observed else None
        self.operations.append(Operation(op, identity, bytes, stream, fails, reserved))

    def _update_empty_cache(self) -> None:
        """Its entries follow it, so what it leaves reserved is known only now."""
        if self.operations and self.operations[-1].op == "empty_cache":
            self.operations[-1] = dataclasses.replace(
                self.operations[-1], reserved=self.reserved
            )


class _CudaRecorder(_Recorder):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self._collects_garbage = "garbage_collection_threshold" in settings
        # Gives back some blocks before it waits and gives back all.
        self._releases_partly = self._collects_garbage or "max_split" in settings
        self._limit = settings["capacity"]
        if self._limit is not None:
            self._limit *= settings.get("memory_fraction", 1)
        self._waiting: dict[int, int] = {}  # address -> the stream made up for it

    def run(self, entries: Iterable[Mapping[str, Any]]) -> None:
        calls = _calls(entries)
        for call, after in zip(calls, [*calls[1:], None], strict=True):
            if call.entry is None:
                self._release(call.before)
            elif call.entry["action"] == "free_requested":
                self._release(call.before)
                self._free(call.entry, after)
            else:
                self._allocate(call)

    def _allocate(self, call: "_Call") -> None:
        assert call.entry is not None
        before = call.before
        if not self._released_by_itself(call):
            self._release([e for e in before if _reserved_by(e) <= 0])
            before = [e for e in before if _reserved_by(e) > 0]
        self.reserved += sum(map(_reserved_by, before))
        address = call.entry.get("addr", 0)
        self.log(
            call.entry["action"], address, call.entry["size"], call.entry["stream"]
        )
        self._complete(before)

    def _released_by_itself(self, call: "_Call") -> bool:
        """The allocator, not the program, gave memory back before this allocation."""
        assert call.entry is not None
        if call.entry["action"] == "oom" or self._collects_garbage:
            return True
        taken = sum(max(_reserved_by(entry), 0) for entry in call.before)
        return self._limit is not None and self.reserved + taken > self._limit

    def _release(self, before: Iterable[Mapping[str, Any]]) -> None:
        before = list(before)
        self._complete(before)
        if released := sum(map(_reserved_by, before)):
            self.reserved += released
            self.add("empty_cache")

    def _complete(self, before: Iterable[Mapping[str, Any]]) -> None:
        for entry in before:
            if entry["action"] == "free_completed" and entry["addr"] in self._waiting:
                stream = self._waiting.pop(entry["addr"])
                self.add("synchronize", stream=stream, observed=False)

    def _free(self, entry: Mapping[str, Any], after: "_Call | None") -> None:
        if not self._completes_at_once(entry["addr"], after):
            stream = -1 - len(self.operations)
            self._waiting[entry["addr"]] = stream
            self.add("record", entry["addr"], stream=stream, observed=False)
        self.log("free_requested", entry["addr"], entry["size"], entry["stream"])

    def _completes_at_once(self, address: int, after: "_Call | None") -> bool:
        """Where the next allocation flushed the cache, the flush may have waited for
        this free: then the block must not be found without it."""
        if after is None or not after.before:
            return False
        first = after.before[0]
        if (first["action"], first["addr"]) != ("free_completed", address):
            return False
        if after.entry is None or after.entry["action"] == "free_requested":
            return True
        flushed = any(_reserved_by(entry) < 0 for entry in after.before)
        return self._releases_partly or not (
            flushed and self._released_by_itself(after)
        )


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of the program, and what torch logged on the way to it. The last has no
    entry."""

    before: list[Mapping[str, Any]]
    entry: Mapping[str, Any] | None


def _calls(entries: Iterable[Mapping[str, Any]]) -> list[_Call]:
    calls: list[_Call] = []
    before: list[Mapping[str, Any]] = []
    for entry in entries:
        if entry["action"] in ("alloc", "oom", "free_requested"):
            calls.append(_Call(before, entry))
            before = []
        elif entry["action"] != "snapshot":
            before.append(entry)
    return [*calls, _Call(before, None)]
