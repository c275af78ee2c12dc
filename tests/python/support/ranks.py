"""Run a function on N gloo ranks, each its own process on this machine.

    values = RankPool(2).run(function, argument)     # one value per rank

A pool keeps its processes, and ranks are forked from one process that has imported
torch and lowtide (`fork_server.py`): a new pool takes milliseconds.  A task that leaves
bytes in lowtide's ledger, of a model that somebody keeps or a tensor that a thread of
gloo's does, is the last of its processes: the next one counts from nothing.  So is one
that leaves many threads: caches of torch's keep groups that were destroyed, and gloo's
threads wake a hundred times a second for each.  Ranks find
each other through a file, never a port.  Every task has a hard timeout; a rank that
raises, dies or hangs ends the whole pool and the `RankFailure` shows each rank's
traceback and what it wrote.  A test that *expects* ranks to fail uses `outcomes`, which
reports instead of raising.

Functions must be importable (module level); arguments and values travel by
`torch.save`.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch

from support.fork_server import Forked, fork

LOG_TAIL_BYTES = 6000
MOST_THREADS = 60  # three for a group of gloo's


class RankFailure(AssertionError):
    """At least one rank raised, died or did not answer in time."""


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: `kind` is value, error, died or timeout."""

    rank: int
    kind: str
    value: Any = None
    left_bytes: int = 0
    num_threads: int = 0
    error_type: str = ""
    error: str = ""
    traceback: str = ""
    log: str = ""

    def __str__(self) -> str:
        lines = [f"--- rank {self.rank}: {self.kind} {self.error_type} {self.error}"]
        lines += [part for part in (self.traceback, self.log) if part]
        return "\n".join(lines)


class RankPool:
    """N processes with an initialised gloo group, `torch.set_num_threads(1)`.

    With `group=False` they have none; RANK, WORLD_SIZE and RANK_POOL_STORE (a path
    for a FileStore) in their environment say how to make one.
    """

    def __init__(
        self,
        world_size: int,
        *,
        group: bool = True,
        group_timeout: float = 60.0,
        env: dict[str, str] | None = None,
    ) -> None:
        self.world_size = world_size
        self._group = group
        self._group_timeout = group_timeout
        self._env = env or {}
        self._processes: list[Forked] = []
        self._connections: list[Connection] = []
        self._directory: Path | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Values of `fn(*args, **kwargs)` by rank."""
        outcomes = self._run(fn, args, kwargs, timeout, patience=3.0)
        if all(outcome.kind == "value" for outcome in outcomes):
            return [outcome.value for outcome in outcomes]
        report = "\n".join(str(o) for o in outcomes if o.kind != "value")
        raise RankFailure(f"{fn.__qualname__} on {self.world_size} ranks\n{report}")

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[Outcome]:
        """What became of each rank; never raises for what a rank did."""
        return self._run(fn, args, kwargs, timeout, patience=timeout)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        _end(self._processes)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._processes, self._connections, self._directory = [], [], None

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.world_size):
            ours, theirs = Pipe()
            settings = {
                "rank": rank,
                "world_size": self.world_size,
                "store": str(self._directory / "store"),
                "group": self._group,
                "group_timeout": self._group_timeout,
                "path": sys.path,
                "folder": os.getcwd(),
            }
            env = os.environ | {
                "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "RANK_POOL_STORE": settings["store"],
            }
            with open(self._log(rank), "wb") as log:
                self._processes.append(
                    fork(settings, env | self._env, theirs.fileno(), log.fileno())
                )
            theirs.close()
            self._connections.append(ours)

    def _log(self, rank: int) -> Path:
        assert self._directory is not None
        return self._directory / f"rank{rank}.log"

    def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        patience: float,
    ) -> list[Outcome]:
        """`patience`: seconds the other ranks get after the first failure."""
        if not self._processes:
            self._start()
        log_starts = [self._log(r).stat().st_size for r in range(self.world_size)]
        message = _encode(fn, args, kwargs, timeout)
        for connection in self._connections:
            connection.send_bytes(message)

        outcomes: dict[int, Outcome] = {}
        # A little longer than the ranks' own limit, at which they write down
        # where they stand.
        deadline = time.monotonic() + timeout + 2.0
        while len(outcomes) < self.world_size:
            waiting = {
                self._connections[r]: r
                for r in range(self.world_size)
                if r not in outcomes
            }
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                outcome = self._receive(rank, connection)
                outcomes[rank] = outcome
                if outcome.kind != "value":
                    deadline = min(deadline, time.monotonic() + patience)
        for rank in range(self.world_size):
            outcomes.setdefault(rank, Outcome(rank, "timeout"))
        if any(outcome.kind != "value" for outcome in outcomes.values()):
            ordered = [
                _with_log(outcomes[r], self._log(r), log_starts[r])
                for r in range(self.world_size)
            ]
            self.close()
            return ordered
        if any(map(_is_last, outcomes.values())):
            self.close()
        return [outcomes[r] for r in range(self.world_size)]

    def _receive(self, rank: int, connection: Connection) -> Outcome:
        try:
            reply = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            code = self._processes[rank].wait()
            return Outcome(rank, "died", error=f"exit status {code}")
        left, threads, reply = pickle.loads(reply)
        kind, content = torch.load(io.BytesIO(reply), weights_only=False)
        if kind == "value":
            return Outcome(
                rank, "value", value=content, left_bytes=left, num_threads=threads
            )
        error_type, error, text = content
        return Outcome(
            rank, "error", error_type=error_type, error=error, traceback=text
        )


def _is_last(outcome: Outcome) -> bool:
    """Of its processes."""
    return outcome.left_bytes > 0 or outcome.num_threads > MOST_THREADS


def _encode(
    fn: Callable[..., Any], args: object, kwargs: object, timeout: float
) -> bytes:
    payload = io.BytesIO()
    torch.save((args, kwargs), payload)
    where = (fn.__module__, inspect.getfile(fn), fn.__qualname__)
    return pickle.dumps((*where, timeout, payload.getvalue()))


def _with_log(outcome: Outcome, path: Path, start: int) -> Outcome:
    log = path.read_bytes()[start:][-LOG_TAIL_BYTES:].decode(errors="replace")
    return replace(outcome, log=log.strip())


def _end(processes: list[Forked]) -> None:
    """The ranks and whatever they started; one without work leaves by itself."""
    deadline = time.monotonic() + 1.0
    for process in processes:
        process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
