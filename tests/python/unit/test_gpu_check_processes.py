"""Commands of gpu_check end when they have to, with all that they started."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
from measuring import Programs
from processes import Processes

LONG = "600"
# A program whose child outlives it, unless the whole group is ended.
PARENT = """\
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", sys.argv[2]])
path = pathlib.Path(sys.argv[1])
path.with_suffix(".part").write_text(str(child.pid))
path.with_suffix(".part").rename(path)
print("begun", flush=True)
time.sleep(float(sys.argv[3]))
"""


def parent(told: Path, seconds: str = LONG) -> list[str]:
    return [sys.executable, "-c", PARENT, str(told), LONG, seconds]


def ended(process: int) -> bool:
    """Within a while: what killed it does not wait for it."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1]
        except FileNotFoundError:
            return True
        if state.split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def awaited(told: Path) -> int:
    while not told.exists():
        time.sleep(0.01)
    return int(told.read_text())


def test_what_it_printed_and_how_it_ended() -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = Processes(60).run([sys.executable, "-c", program])
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)
    with pytest.raises(RuntimeError) as caught:
        Processes(60).checked([sys.executable, "-c", program])
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("python") and first.endswith(": exit 3")
    assert rest == ["out", "err"]


def test_it_runs_in_the_repository_with_the_environment_given() -> None:
    program = "import os; print(os.getcwd(), os.environ['WHO'])"
    printed = Processes(60).checked([sys.executable, "-c", program], {"WHO": "me"})
    assert printed == f"{processes.REPOSITORY} me\n"


def test_what_would_change_figures_is_not_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    monkeypatch.setenv("KEPT", "1")
    program = "import os; print(*sorted(set(os.environ) & set(os.sys.argv[1:])))"
    names = (*processes.NOT_PASSED_ON, "KEPT")
    command = [sys.executable, "-c", program, *names]
    assert Processes(60).checked(command) == "KEPT\n"
    given = {"PYTORCH_CUDA_ALLOC_CONF": ""}
    printed = Processes(60).checked(command, given)
    assert printed == "KEPT PYTORCH_CUDA_ALLOC_CONF\n"


def test_at_the_deadline_all_that_was_started_is_ended(tmp_path: Path) -> None:
    told = tmp_path / "child"
    with pytest.raises(RuntimeError) as caught:
        Processes(3).run(parent(told))
    text = str(caught.value)
    assert "expected an end within the step's 3 s, got none" in text
    assert text.splitlines()[-1] == "begun"
    assert ended(int(told.read_text()))


def test_seconds_are_those_of_all_commands() -> None:
    of_a_step = Processes(0)
    with pytest.raises(RuntimeError, match="within the step's 0 s"):
        of_a_step.run(["sleep", LONG])
    with pytest.raises(RuntimeError, match=r"^sleep 600: "):
        of_a_step.run(["sleep", LONG])


def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    told = tmp_path / "child"
    assert Processes(60).run(parent(told, "0")).returncode == 0
    assert ended(int(told.read_text()))


# Two programs in threads, as in a measurement.
RUN = """\
import sys
sys.path[:0] = sys.argv[1].split(":")
import processes
from measuring import Programs
processes.end_all_on_signals()
of_a_step = Programs(processes.Processes(600))
of_a_step.together([(sys.argv[2], told) for told in sys.argv[3:]], at_once=2)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_program(number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(
        PARENT.replace("sys.argv[2]", f"'{LONG}'").replace("sys.argv[3]", LONG)
    )
    told = [tmp_path / "first", tmp_path / "second", tmp_path / "third"]
    paths = ":".join(path for path in sys.path if path)
    arguments = (paths, str(program), *map(str, told))
    run = subprocess.Popen([sys.executable, "-c", RUN, *arguments])
    children = [awaited(path) for path in told[:2]]
    run.send_signal(number)
    assert run.wait(60) == 128 + number
    assert all(map(ended, children))
    assert not told[2].exists()  # it was not begun any more


def test_nothing_is_begun_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_ended", False)
    processes.end_all()
    with pytest.raises(RuntimeError, match="^echo: not begun, this run is ending$"):
        Processes(60).run(["echo"])


def test_programs_say_json_on_their_last_line(tmp_path: Path) -> None:
    program = tmp_path / "two.py"
    program.write_text("import sys\nprint('a warning')\nprint([int(sys.argv[1]) + 1])")
    assert Programs(Processes(60))(str(program), 1) == [2]
    calls = [(str(program), n) for n in range(4)]
    assert Programs(Processes(60)).together(calls) == [[1], [2], [3], [4]]


def test_programs_see_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    program = tmp_path / "which.py"
    program.write_text("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert Programs(Processes(60))(str(program)) == 0
