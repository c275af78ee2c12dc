"""Calls a test's function in a process whose CUDA is the dry driver's:

    def allocated_by(mib): ...          # at the top level of a module

    def test_it():
        assert call_dry(allocated_by, 12, world=8) == ...

A process takes seconds to start: let one call do what several tests look at.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowtide.phantom.dry import launch


def call_dry(
    function: Callable[..., Any],
    *arguments: Any,
    machine: launch.Machine | None = None,
    environment: dict[str, str] | None = None,
    **keywords: Any,
) -> Any:
    """What it returned, pickled. What the process printed is in the error if it
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "asked"), Path(folder, "answer")
        # Modules of tests have different names here and there.
        module = sys.modules[function.__module__]
        file = str(Path(module.__file__ or "").resolve())
        call = (file, function.__qualname__, arguments, keywords)
        asked.write_bytes(pickle.dumps(call))
        run_dry(
            *(__file__, str(asked), str(answer)),
            machine=machine,
            environment=environment,
        )
        return pickle.loads(answer.read_bytes())


def run_dry(
    *program: str,
    machine: launch.Machine | None = None,
    report: Path | None = None,
    environment: dict[str, str] | None = None,
    status: int = 0,
) -> subprocess.CompletedProcess[str]:
    """A program to its end, as ``lowtide phantom`` runs it. ``report``: a file for its
    JSON; ``status``: how it is to end."""
    machine = machine or launch.Machine()
    settings = launch.Settings(report=str(report) if report else None)
    base = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_")}
    base["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        launch.command(program, machine, settings),
        env=launch.environment(machine, base) | (environment or {}),
        capture_output=True,
        text=True,
    )
    said = f"exit status {done.returncode}: {done.stdout}{done.stderr}"
    assert done.returncode == status, said
    return done


def _answer(asked: str, answer: str) -> None:
    file, name, arguments, keywords = pickle.loads(Path(asked).read_bytes())
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = getattr(module, name)(*arguments, **keywords)
    Path(answer).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _answer(*sys.argv[1:])
