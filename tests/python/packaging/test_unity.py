"""LOWTIDE_UNITY: files that are compiled together do not name things alike."""

import json
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(sysconfig.get_path("scripts"))


def configure(build: Path, *options: str) -> None:
    subprocess.run(
        [
            *(SCRIPTS / "cmake", "-S", ROOT, "-B", build, "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={SCRIPTS / 'ninja'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DLOWTIDE_UNITY=ON",
            *options,
        ],
        check=True,
        capture_output=True,
    )


def test_libraries_and_tests_are_joined(tmp_path: Path) -> None:
    """Tests with a namespace for each file; what they share is compiled alone."""
    configure(tmp_path, "-DLOWTIDE_CUDA=OFF", "-DLOWTIDE_TESTS=ON")
    rules = (tmp_path / "build.ninja").read_text()
    assert "lowtide_core.dir/Unity/" in rules and "shard_test.dir/Unity/" in rules
    assert "shard_test.dir/tests/cpp/shard/harness.cpp.o" in rules
    joined = next(tmp_path.glob("CMakeFiles/shard_test.dir/Unity/*.cxx")).read_text()
    assert joined.count("#define LOWTIDE_FILE unity_") == joined.count("#include ")


def test_every_cpp_test_has_the_namespace_of_its_file() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests" / "cpp").rglob("*_test.cpp")
        if "namespace LOWTIDE_FILE {" not in path.read_text()
    ]
    assert without == [], "write `namespace LOWTIDE_FILE {` for `namespace {`"


@pytest.mark.slow("unity")
@pytest.mark.timeout(900)  # reads all of the C++ once
def test_all_files_of_a_library_may_be_joined(tmp_path: Path) -> None:
    """Which eight are joined changes with every new file, and with CUDA."""
    one_file = ("-DCMAKE_UNITY_BUILD_BATCH_SIZE=0", "-DLOWTIDE_CUDA_ARCHS=9.0")
    configure(tmp_path, *one_file)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    joined = [c for c in commands if "/Unity/" in c["file"]]
    assert len(joined) >= 4
    for command in joined:
        words = shlex.split(command["command"])
        output = words.index("-o")
        if command["file"].endswith(".cu"):  # nvcc has no -fsyntax-only
            words[output + 1] = str(tmp_path / "kernels.o")
        else:
            words[output : output + 2] = ["-fsyntax-only"]
        checked = subprocess.run(
            words,
            cwd=command["directory"],
            capture_output=True,
            text=True,
        )
        assert checked.returncode == 0, checked.stderr
