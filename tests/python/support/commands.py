"""Run programs to their end, several at once, and leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


def one_agent(num_processes: int) -> list[str]:
    return torchrun("--standalone", f"--nproc-per-node={num_processes}")


def run_together(
    commands: Sequence[Sequence[str]],
    *,
    timeout: float,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """What each printed, in ``folder`` or here, with ``environment`` beside this
    process's.  AssertionError when one fails or takes too long."""
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
        for command in commands
    ]
    deadline = time.monotonic() + timeout
    outputs: list[str] = []
    try:
        for process in processes:
            remaining = max(0.0, deadline - time.monotonic())
            try:
                output, _ = process.communicate(timeout=remaining)
            except subprocess.TimeoutExpired as expired:
                so_far = (expired.stdout or b"").decode(errors="replace")
                raise AssertionError(
                    f"{process.args} still runs after {timeout:.0f} s\n{so_far}"
                ) from None
            outputs.append(output)
    finally:
        end_trees([process.pid for process in processes])
        for process in processes:
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, f"{process.args}\n{output}"
    return outputs


def end_trees(roots: Sequence[int]) -> None:
    """torchrun's ranks lead sessions of their own: its group does not hold them."""
    every = [pid for root in roots for pid in [root, *descendants(root)]]
    for pid in every:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [p for child in map(int, children) for p in [child, *descendants(child)]]
