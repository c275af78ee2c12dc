"""One rank of a world whose other ranks are not there.

Its store answers at once, NCCL is the dry driver's, gloo's groups are torch's ``fake``
ones, and of objects that ranks exchange every rank has this one's.
"""

from __future__ import annotations

import datetime
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from . import calls, groups, values

_RANKS_OF_MACHINE = 8


class LoneStore(Store):
    """A store in which what others would write is there already. Thread-safe."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self._world = world
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        content = _as_bytes(value)
        with self._lock:
            self._values[key] = content
        groups.hear(key, content)

    def get(self, key: str) -> bytes:
        with self._lock:
            content = self._values.get(key)
        if content is None:
            content = groups.ids_of(key)
        groups.hear(key, content)
        return content

    def add(self, key: str, value: int) -> int:
        """Each rank adds the same."""
        with self._lock:
            now = int(self._values.get(key, b"0")) + value * self._world
            self._values[key] = str(now).encode()
            return now

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        with self._lock:
            now = self._values.get(key, _as_bytes(expected))
            if now == _as_bytes(expected):
                now = self._values[key] = _as_bytes(desired)
            return now

    def check(self, keys: list[str]) -> bool:
        """What was not written yet would be an error's or an abort's."""
        with self._lock:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        return None

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        with self._lock:
            return len(self._values)

    def clone(self) -> LoneStore:
        """For a group that is split off another."""
        return self

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        return None

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(minutes=30)


def install(world: int, rank: int) -> None:
    """For the rest of the process: rendezvous of any kind gives ``rank`` of
    ``world``."""
    store = LoneStore(world)

    def meet(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        _require_same(url, world, rank)
        yield store, rank, world

    # A function of the same name hides the module.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    for scheme in handlers:
        handlers[scheme] = meet
    groups.install()
    calls.install()
    replace_gloo()
    for name, function in (
        ("all_gather_object", _all_gather_object),
        ("gather_object", _gather_object),
        ("broadcast_object_list", _broadcast_object_list),
        ("scatter_object_list", _scatter_object_list),
    ):
        setattr(distributed_c10d, name, function)
        setattr(dist, name, function)
    _replace_spawn(world, rank)
    _replace_checkpoints()


def _require_same(url: str, world: int, rank: int) -> None:
    """torch puts what init_process_group was given into the address."""
    given = {k: int(v[0]) for k, v in parse_qs(urlparse(url).query).items()}
    asked = given.get("rank", rank), given.get("world_size", world)
    if asked != (rank, world):
        raise ValueError(
            "lowtide: phantom: expected init_process_group without a rank and size, or "
            f"for rank {rank} of {world}, got rank {asked[0]} of {asked[1]}. Pass "
            f"--world {asked[1]} --rank {asked[0]}."
        )


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def replace_gloo() -> None:
    """Its groups would wait for the others; torch's ``fake`` ones stand for them under
    gloo's name."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers
    backend: Any = distributed_c10d.Backend
    config: Any = distributed_c10d.BackendConfig
    backend.backend_type_map[backend.GLOO] = dist.ProcessGroup.BackendType.CUSTOM
    asked = config.get_device_backend_map

    def without_gloo(self: Any) -> dict[str, str]:
        return {
            device: backend.FAKE if name == backend.GLOO else name
            for device, name in asked(self).items()
        }

    config.get_device_backend_map = without_gloo


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    return None


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> None:
    if scatter_object_input_list is not None:
        rank = dist.get_rank(group)
        scatter_object_output_list[0] = scatter_object_input_list[rank]


def _replace_spawn(world: int, rank: int) -> None:
    """What a program starts of its machine's ranks is this one, here."""
    of_machine = min(world, _RANKS_OF_MACHINE)

    def spawn(
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        *_: Any,
        **__: Any,
    ) -> None:
        if nprocs != of_machine:
            raise ValueError(
                "lowtide: phantom: expected torch.multiprocessing.spawn of the ranks "
                f"of a machine, {of_machine}, got {nprocs}. Pass --world {nprocs}."
            )
        fn(rank % of_machine, *args)

    torch.multiprocessing.spawn = spawn


def _replace_checkpoints() -> None:
    """Ranks agree on who writes what; and values that nobody computed must not be taken
    for a checkpoint. Everything before that, such as gathering a full state dict,
    runs."""
    for module, name, done in (
        (dcp.state_dict_saver, "_save_state_dict", "nothing was written"),
        (dcp.state_dict_loader, "_load_state_dict", "nothing was read"),
    ):
        public = f"torch.distributed.checkpoint.{name.split('_')[1]}"

        def skipped(
            *_: Any, _what: str = f"{public} was skipped: {done}", **__: Any
        ) -> Any:
            values.notes[_what, values.where()] += 1
            return dcp.metadata.Metadata({})

        setattr(module, name, skipped)
