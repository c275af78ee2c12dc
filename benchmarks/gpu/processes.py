"""Commands that end when they have to, with all that they started: whatever is left
running would hold the GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO

REPOSITORY = Path(__file__).resolve().parents[2]
TAIL = 4000  # characters of output that an error carries
# What a shell or an image may set, and figures would follow.
NOT_PASSED_ON = (
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)

_running: set[int] = set()  # process groups
_lock = threading.RLock()  # a signal's handler may come while its thread holds it
_ended = False


class Processes:
    """Commands of one step, in any thread. ``seconds`` from now on they are ended."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> CompletedProcess[str]:
        """Its output and status, whatever they are. RuntimeError at the deadline."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = _start(command, environment, out, err)
            try:
                process.wait(self._left())
            except subprocess.TimeoutExpired:
                _end(process.pid)
                raise RuntimeError(
                    f"{_named(command)}: expected an end within the step's "
                    f"{self._seconds:.0f} s, got none; ended it\n"
                    f"{(_text(out) + _text(err))[-TAIL:]}"
                ) from None
            finally:
                _end(process.pid)
                process.wait()
            return CompletedProcess(
                list(command), process.returncode, _text(out), _text(err)
            )

    def checked(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> str:
        """What it printed. RuntimeError with the end of its output if it fails."""
        done = self.run(command, environment)
        if done.returncode != 0:
            text = (done.stdout + done.stderr)[-TAIL:]
            raise RuntimeError(f"{_named(command)}: exit {done.returncode}\n{text}")
        return done.stdout

    def _left(self) -> float | None:
        left = self._deadline - time.monotonic()
        return None if left == float("inf") else max(left, 0)


def end_all() -> None:
    """Ends what is running, and lets nothing begin."""
    global _ended
    with _lock:
        _ended = True
        for group in list(_running):
            _end(group)


def end_all_on_signals() -> None:
    """SIGTERM and SIGINT end everything, this process too: exit 128 + the signal's
    number."""

    def end(number: int, _frame: object) -> None:
        end_all()
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def _start(
    command: Sequence[str],
    environment: Mapping[str, str] | None,
    out: IO[bytes],
    err: IO[bytes],
) -> subprocess.Popen[bytes]:
    with _lock:
        if _ended:
            raise RuntimeError(f"{_named(command)}: not begun, this run is ending")
        process = subprocess.Popen(
            list(command),
            cwd=REPOSITORY,
            env=_inherited() | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        _running.add(process.pid)
        return process


def _inherited() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in NOT_PASSED_ON}


def _end(group: int) -> None:
    """All of a group; nothing if no process of it is left."""
    with _lock:
        _running.discard(group)
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _named(command: Sequence[str]) -> str:
    """Without the folders of this machine."""
    return " ".join(Path(a).name if a.startswith("/") else a for a in command)


def _text(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")
