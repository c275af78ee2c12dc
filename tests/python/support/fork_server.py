"""A process that has imported torch and lowtide, and forks ranks of a `RankPool`.

Importing both takes two seconds of a core, in every process that starts anew; a fork
takes milliseconds.  The server computes nothing, so that none of torch's threads exists
when it forks.  It is started by the first pool of a program and ends with the program,
and what it forked ends with it.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("rank_worker.py")
POLL_SECONDS = 0.005


@dataclass
class Forked:
    """A process of the server's: the leader of a session and group of its own."""

    pid: int
    _server: Connection = field(repr=False)
    _status: int | None = None

    def wait(self, timeout: float = float("inf")) -> int | None:
        """Its exit status, negative for a signal; None if it still runs then."""
        deadline = time.monotonic() + timeout
        while self._status is None:
            self._server.send(("status", self.pid))
            self._status = self._server.recv()
            if self._status is not None or time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        return self._status


def fork(settings: dict[str, Any], env: dict[str, str], task: int, log: int) -> Forked:
    """A rank with that environment, which takes tasks from the descriptor ``task`` and
    writes to ``log``."""
    process, connection = _server()
    connection.send(("fork", settings, dict(env)))
    for descriptor in (task, log):
        reduction.send_handle(connection, descriptor, process.pid)
    return Forked(connection.recv(), connection)


@cache
def _server() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    process = subprocess.Popen(
        [sys.executable, str(WORKER), str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return process, ours
