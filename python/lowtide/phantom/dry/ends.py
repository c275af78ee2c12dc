"""How a program came to its end: by itself, by a signal, or at a limit of time; and the
line of Python that it was in."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

EXPIRED = 124  # the exit status, as that of timeout(1)
_ASK = signal.SIGRTMAX - 5  # where it is
_ANSWERS_WITHIN = 3.0  # seconds
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_OF_OTHERS = (
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib")),
    str(Path(__file__).parents[2]) + os.sep,
    "<",
)
_open: list[TextIO] = []  # files that must stay so


def tell(path: str) -> None:
    """For the rest of this process: where it is goes into the file when a signal ends
    it, and when :func:`line_of_process` asks."""
    file = open(path, "w")
    _open.append(file)
    faulthandler.enable(file)
    faulthandler.register(_ASK, file)


@dataclass(frozen=True)
class End:
    """``status``: the exit status, or less than 0 a signal; ``line`` is empty where it
    is not known."""

    status: int
    expired: bool = False
    line: str = ""

    @property
    def exit_status(self) -> int:
        if self.expired:
            return EXPIRED
        return 128 - self.status if self.status < 0 else self.status

    def complaint(self, command: str, program: str, limit: float | None) -> str:
        """What is said of a program that did not end by itself; else empty."""
        where = f" at {self.line}" if self.line else ""
        if self.expired:
            return f"lowtide: {command}: {at_limit(program, limit or 0, self.line)}"
        if self.status >= 0:
            return ""
        return (
            f"lowtide: {command}: expected {program} to end by itself, got signal "
            f"{name_of_signal(-self.status)}{where}. If it left CUDA's API (custom "
            "kernels that the host looks into, other drivers), it can not run dry."
        )


def at_limit(program: str, limit: float, line: str) -> str:
    where = f" at {line}" if line else ""
    return (
        f"expected {program} to end within --limit {limit:g} seconds, got one that is "
        f"still running{where}. Give it fewer steps in its own arguments or a longer "
        "--limit. A loop that waits for a value of the GPU never ends, for those read "
        "as 1, False or finite."
    )


def name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of those for real time
        return str(number)


def wait(child: subprocess.Popen[bytes], limit: float | None, told: Path) -> End:
    """Until it ends, for ``limit`` seconds at most: then it and all of its process
    group, which must be its own, are killed. ``told`` is the file of :func:`tell`."""
    try:
        return End(child.wait(limit), line=last_line(told))
    except subprocess.TimeoutExpired:
        line = line_of_process(child.pid, told)
        kill_group(child.pid)
        return End(child.wait(), expired=True, line=line)


def line_of_process(process: int, told: Path) -> str:
    os.kill(process, _ASK)
    deadline = time.monotonic() + _ANSWERS_WITHIN
    while time.monotonic() < deadline:
        before = told.stat().st_size if told.exists() else 0
        time.sleep(0.1)
        if before and told.stat().st_size == before:
            break
    return last_line(told)


def kill_group(process: int) -> None:
    """Where it leads one; else the process alone."""
    kill: Callable[[int, int], None] = os.kill
    try:
        if os.getpgid(process) == process:
            kill = os.killpg
        kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass


def last_line(told: Path) -> str:
    """The innermost line of the thread that told, of the program's own rather than of
    what is installed: ``train.py:12 in main``."""
    text = told.read_text(errors="replace") if told.exists() else ""
    frames = list(_frames(text))
    own = [frame for frame in frames if not frame[0].startswith(_OF_OTHERS)]
    installed = [frame for frame in frames if not frame[0].startswith(_OF_OTHERS[2:])]
    for file, number, function in (own or installed)[:1]:
        return f"{file}:{number} in {function}"
    return ""


def _frames(text: str) -> Iterator[tuple[str, str, str]]:
    """Innermost first; of the thread that got the signal."""
    _, found, rest = text.partition("Current thread")
    for line in (rest if found else text).splitlines()[1:]:
        frame = _FRAME.match(line)
        if frame is None:
            return
        yield frame[1], frame[2], frame[3]
