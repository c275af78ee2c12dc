"""LOWTIDE_UNITY: files that are compiled together do not name things alike."""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(sysconfig.get_path("scripts"))


def test_the_libraries_are_joined_and_the_tests_are_not(tmp_path: Path) -> None:
    """Files of a room of tests have helpers of the same names."""
    subprocess.run(
        [
            *(SCRIPTS / "cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={SCRIPTS / 'ninja'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            *("-DLOWTIDE_CUDA=OFF", "-DLOWTIDE_UNITY=ON", "-DLOWTIDE_TESTS=ON"),
        ],
        check=True,
        capture_output=True,
    )
    rules = (tmp_path / "build.ninja").read_text()
    assert "lowtide_core.dir/Unity/" in rules
    assert "_test.dir/" in rules and "_test.dir/Unity/" not in rules
