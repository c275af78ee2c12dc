"""Stores that ranks meet in: of one that is alone, and of processes beside each
other."""

from __future__ import annotations

import datetime
import socket
import struct
import threading
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from . import groups

HOST = "127.0.0.1"
# A rank that computes nothing is not late by as much.
LONGEST_WAIT = datetime.timedelta(seconds=120)
# Where torch's symmetric memory puts requests and, shorter than they are, handles.
_SYMMETRIC = "CUDASymmetricMemory"
_FABRIC_HANDLE = 64  # bytes


def ended_key(rank: int) -> str:
    """There when the process of that rank has ended."""
    return f"lowtide/ended/{rank}"


class Meeting:
    """The store of ranks in processes beside each other, for the process that starts
    them."""

    def __init__(self) -> None:
        # A port that torch opened would be open to other machines, whatever the host.
        with socket.create_server((HOST, 0)) as listening:
            port = listening.getsockname()[1]
            self._store = TCPStore(
                HOST,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )

    @property
    def port(self) -> int:
        return self._store.port

    def ended(self, rank: int) -> None:
        """Its process has."""
        self._store.set(ended_key(rank), "")


class LoneStore(Store):
    """What others would write is there already. Thread-safe."""

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
            content = self._as_of_peer(key) or groups.ids_of(key)
        groups.hear(key, content)
        return content

    def _as_of_peer(self, key: str) -> bytes | None:
        """Of what ranks put there each under its own, this one's."""
        place, _, rank = key.rpartition("/")
        if not rank.isdigit():
            return None
        with self._lock:
            own = next(
                (
                    content
                    for name, content in self._values.items()
                    if _is_of_rank(name, place)
                ),
                None,
            )
        if own is not None and _SYMMETRIC in place and len(own) > _FABRIC_HANDLE:
            return _on_another_device(own, int(rank))
        return own

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

    # The names that torch asks a store for which others are made of, as PrefixStore.
    deleteKey = delete_key
    getNumKeys = num_keys

    def clone(self) -> LoneStore:
        """For a group that is split off another."""
        return self

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        return None

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(minutes=30)


class SharedStore(Store):
    """torch's own between processes, whose ids of communicators are heard.
    Thread-safe."""

    def __init__(self, store: TCPStore) -> None:
        super().__init__()
        self._store = store

    @classmethod
    def connect(cls, port: int) -> SharedStore:
        """To the store of a :class:`Meeting`."""
        return cls(TCPStore(HOST, port, is_master=False, timeout=LONGEST_WAIT))

    def set(self, key: str, value: str | bytes) -> None:
        content: Any = value  # torch takes bytes, too
        self._store.set(key, content)
        groups.hear(key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        content = self._store.get(key)
        groups.hear(key, content)
        return content

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._store.wait(keys, min(timeout or LONGEST_WAIT, LONGEST_WAIT))

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    deleteKey = delete_key
    getNumKeys = num_keys

    def clone(self) -> SharedStore:
        return self

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._store.set_timeout(min(timeout, LONGEST_WAIT))

    @property
    def timeout(self) -> datetime.timedelta:
        return LONGEST_WAIT


def _is_of_rank(name: str, place: str) -> bool:
    before, _, rank = name.rpartition("/")
    return before == place and rank.isdigit()


def _on_another_device(request: bytes, rank: int) -> bytes:
    """A rank's request for symmetric memory begins with the number of its device, which
    no other rank of the host may have."""
    (device,) = struct.unpack_from("i", request)
    return struct.pack("i", device + 1 + rank) + request[struct.calcsize("i") :]


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
