"""Under `python -m lowtide run` a program is what it is under `python`: its arguments,
`__main__`, folder of modules, exit status and tracebacks."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

RUN = ("-m", "lowtide", "run")
PROGRAM = """
import atexit, os, pickle, sys
import beside
class Pickled: pass
pickle.dumps(Pickled())
atexit.register(lambda: print("at exit", len(pickle.dumps(Pickled())) > 0, flush=True))
print(__name__, __file__, __spec__ and __spec__.name, __package__, sys.argv, flush=True)
print(sys.path[0], beside.__file__, sys.modules["__main__"].Pickled is Pickled)
def end(how):
    if how == "raise":
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("second") from error
    if how == "hook":
        sys.excepthook = lambda kind, error, entry: print(
            kind.__name__, entry.tb_frame.f_code.co_filename, flush=True
        )
        raise ValueError
    if how == "interrupt":
        raise KeyboardInterrupt
    sys.exit({"status": 7, "text": "why", "none": None}.get(how))
end(sys.argv[-1])
"""
ENDS = ("raise", "hook", "interrupt", "text", "wrong syntax")


def execute(words: tuple[str, ...], folder: Path) -> tuple[int, str, str]:
    """Exit status, output, and what is said but by lowtide."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    said = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith(("lowtide: ", "<frozen runpy>"))
        # The interpreter's own ways to the module.
        and "frozen runpy" not in line
    ]
    return done.returncode, done.stdout, "\n".join(said)


def test_ends_are_those_of_python(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "beside.py").touch()
    (tmp_path / "inner" / "train.py").write_text(PROGRAM)
    (tmp_path / "inner" / "bad.py").write_text("x = 1\nif x\n")
    programs = {
        end: ("inner/bad.py",)
        if end == "wrong syntax"
        else ("inner/train.py", "--lr", "1", "--", "--policy", end)
        for end in ENDS
    }
    with ThreadPoolExecutor(3) as pool:
        theirs = {
            end: pool.submit(execute, words, tmp_path)
            for end, words in programs.items()
        }
        ours = {
            end: pool.submit(execute, (*RUN, *words), tmp_path)
            for end, words in programs.items()
        }
    for end in ENDS:
        assert ours[end].result() == theirs[end].result(), end
    assert [theirs[end].result()[0] for end in ENDS] == [1, 1, -2, 1, 1]


def test_a_module_is_that_of_python(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    for file in (package / "__init__.py", tmp_path / "beside.py"):
        file.touch()
    (package / "train.py").write_text(PROGRAM)
    (package / "__main__.py").write_text(PROGRAM)
    for name in ("package", "package.train"):
        words = ("-m", name, "--", "-m", "status")
        assert execute((*RUN, *words), tmp_path) == execute(words, tmp_path)


MESSAGES = {
    ("gone.py",): "expected a Python file, got 'gone.py'. Check the name, and the ",
    ("-m", "no.module"): "expected a module that can be imported, got 'no.module'.",
    ("--policy", "keep=all", "x.py"): "--policy: expected save, offload, recompute ",
}


@pytest.mark.parametrize("words", MESSAGES)
def test_what_can_not_be_run(tmp_path, words):
    (tmp_path / "x.py").touch()
    done = subprocess.run(
        [sys.executable, *RUN, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"lowtide: run: {MESSAGES[words]}")


def test_a_program_that_shards_nothing_is_told_so(tmp_path):
    (tmp_path / "train.py").write_text("print('trained')\n")
    done = subprocess.run(
        [sys.executable, *RUN, "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.splitlines()[-1] == (
        "lowtide: run: expected a call of fully_shard, got none in this process: "
        "lowtide sharded nothing here. Processes of multiprocessing report for "
        "themselves; a launcher of programs has to launch lowtide, as in `accelerate "
        "launch -m lowtide run train.py`."
    )
