"""Runs a program in the process that has the dry driver:

    program.py '{"world": 8, ...}' file.py arguments
    program.py '{"world": 8, ...}' -m module arguments

The program finds torch, sys.argv, sys.path and __main__ as if it had been started
itself.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType


def main() -> None:
    settings = json.loads(sys.argv[1])
    program = sys.argv[2:]
    inside = _load_beside()
    # Before the program sees torch: what it reads and whom it meets.
    inside.values.install()
    inside.sizes.install(settings["nonzero"])
    inside.settling.install()
    told = (settings[name] for name in ("world", "rank", "port"))
    inside.lone_rank.install(*told)
    if settings["told"]:
        inside.ends.tell(settings["told"])
    if settings["snapshot"]:
        inside.report.record_history(settings["snapshot"])
    if settings["report"]:
        inside.report.keep_counts()
        inside.report.write_at_exit(settings["report"])
    del sys.path[0]  # of this file
    inside.as_main.prepare(program)
    _end(_status_of(program, inside.as_main.run))


def _status_of(program: list[str], run: Callable[[list[str]], None]) -> int:
    """What the interpreter would exit with behind the program, and say of it."""
    try:
        run(program)
    except SystemExit as asked:
        if asked.code is None or isinstance(asked.code, int):
            return asked.code or 0
        print(asked.code, file=sys.stderr)
        return 1
    except BaseException as error:
        error.__traceback__ = _of_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _of_program(entry: TracebackType | None) -> TracebackType | None:
    """Without what started the program, which a traceback of the interpreter's lacks
    too."""
    starters = (__file__, str(Path(__file__).with_name("as_main.py")), "<frozen runpy>")
    while entry is not None and entry.tb_frame.f_code.co_filename in starters:
        entry = entry.tb_next
    return entry


def _end(status: int) -> None:
    """Ends as the interpreter does, but for what then goes wrong in threads that a
    program leaves behind. Autograd's let go of a backward's Python callbacks after the
    host went on, and the host never waits for kernels here."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


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
    for part in (
        *("as_main", "values", "sizes", "settling"),
        *("lone_rank", "report", "ends"),
    ):
        importlib.import_module(f"{name}.{part}")
    return package


if __name__ == "__main__":
    main()
