"""Runs a program in the process that has the dry driver:

    program.py '{"world": 8, ...}' file.py arguments
    program.py '{"world": 8, ...}' -m module arguments

The program finds torch, sys.argv, sys.path and __main__ as if it had been started
itself.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    settings = json.loads(sys.argv[1])
    program = sys.argv[2:]
    inside = _load_beside()
    # Before the program sees torch: what it reads and whom it meets.
    inside.values.install(settings["nonzero"])
    inside.lone_rank.install(settings["world"], settings["rank"])
    if settings["snapshot"]:
        inside.report.record_history(settings["snapshot"])
    if settings["report"]:
        inside.report.write_at_exit(settings["report"])
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path[0] = ""
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


def _load_beside() -> ModuleType:
    """The package of this file under a name of its own, so that importing it imports
    nothing else of lowtide."""
    folder = Path(__file__).parent
    name = "_lowtide_dry"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    for part in ("values", "lone_rank", "report"):
        importlib.import_module(f"{name}.{part}")
    return package


if __name__ == "__main__":
    main()
