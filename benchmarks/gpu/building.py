"""Builds lowtide for this GPU, and runs the tests that have CUDA instantiations."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import bars
from bars import row, with_bar
from case import Row
from prerequisites import the_gpu, tool, torch_for_cuda
from processes import REPOSITORY, TAIL, Processes
from step import Figures

BUILD = REPOSITORY / "build" / "gpu"
PACKAGE = REPOSITORY / "python" / "lowtide"
LIBRARIES = ("_C*.so", "liblowtide_core.so", "liblowtide_cuda_dry.so")
# Rooms of tests/cpp with tests on CUDA.
ROOMS = ("device", "ops")
GOOGLETEST = "FETCHCONTENT_SOURCE_DIR_GOOGLETEST"
CONFIGURED_FOR_TESTS = "LOWTIDE_TESTS:BOOL=ON"
NO_GTEST = (
    "GoogleTest was not found; install libgtest-dev, or set "
    f"{GOOGLETEST} to its sources"
)


def configure(with_tests: bool, arch: str) -> list[str]:
    """Without a network: CMake would download GoogleTest otherwise."""
    sources = os.environ.get(GOOGLETEST)
    return [
        *(tool("cmake"), "-S", ".", "-B", str(BUILD), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        *("-DLOWTIDE_CUDA=ON", f"-DLOWTIDE_CUDA_ARCHS={arch}", "-DLOWTIDE_UNITY=ON"),
        f"-DLOWTIDE_TESTS={'ON' if with_tests else 'OFF'}",
        f"-D{GOOGLETEST}={Path(sources).absolute()}"
        if sources
        else "-DFETCHCONTENT_FULLY_DISCONNECTED=ON",
    ]


def make(processes: Processes, *targets: str) -> None:
    jobs = str(os.cpu_count() or 1)
    build = (tool("cmake"), "--build", str(BUILD), "-j", jobs, "--target")
    processes.checked([*build, *targets])


@dataclass(frozen=True)
class Build:
    name: str = "build"
    what: str = "lowtide for this GPU"
    seconds: int = 80

    def run(self, processes: Processes) -> Figures:
        properties = the_gpu(torch_for_cuda(), any_gpu=True)
        arch = f"{properties.major}.{properties.minor}"
        has_tests = processes.run(configure(True, arch)).returncode == 0
        if not has_tests:
            processes.checked(configure(False, arch))
        make(processes, "dev")
        install = (tool("cmake"), "--install", str(BUILD), "--prefix", "python")
        processes.checked(install)
        return {"arch": arch, "tests": has_tests}

    def stands(self, figures: Figures) -> bool:
        """Without GoogleTest it is run again: it may be there now, and ninja builds
        what changed."""
        built = (BUILD / "build.ninja").exists()
        installed = all(any(PACKAGE.glob(pattern)) for pattern in LIBRARIES)
        return built and installed and figures["tests"] is True

    def rows(self, figures: Figures) -> Iterator[Row]:
        quantity = "built for compute capability"
        yield row("lowtide", quantity, float(figures["arch"]), "", "measured")


@dataclass(frozen=True)
class CppTests:
    """Compiles them, which measurements need not wait for, then ctest, with what
    GoogleTest says of each test."""

    name: str = "tests"
    what: str = "ctest of the rooms with CUDA instantiations"
    seconds: int = 25

    def run(self, processes: Processes) -> Figures:
        cache = BUILD / "CMakeCache.txt"
        if not cache.exists():
            raise RuntimeError(
                "tests: expected what the step build leaves, got none. Run it first."
            )
        if CONFIGURED_FOR_TESTS not in cache.read_text():
            return {"missing": NO_GTEST}
        make(processes, *(f"{room}_test" for room in ROOMS))
        ctest = Path(sysconfig.get_path("scripts"), "ctest")
        program = str(ctest) if ctest.exists() else tool("ctest")
        rooms = "|".join(ROOMS)
        done = processes.run(
            [
                *(program, "--test-dir", str(BUILD), "--verbose"),
                *("--no-tests=error", "-R", f"^cpp\\.({rooms})$"),
            ]
        )
        return counts(done.stdout, done.returncode)

    def stands(self, figures: Figures) -> bool:
        return True

    def rows(self, figures: Figures) -> Iterator[Row]:
        for key in ("passed", "passed on CUDA"):
            yield row("lowtide", f"C++ tests: {key}", figures[key], "", "measured")
        note = ", ".join(figures["names of failed"])
        yield from with_bar(
            "C++ tests: failed", figures["failed"], bars.NONE, note=note
        )


def counts(text: str, returncode: int) -> Figures:
    passed = re.findall(r"\[ +OK \] (\S+)", text)
    # A failed test is listed again at the end, beside a count of them.
    failed = sorted(set(re.findall(r"\[ +FAILED +\] ([\w/]+\.[\w/]+)", text)))
    if returncode != 0 and not failed:
        raise RuntimeError(f"ctest: exit {returncode}\n{text[-TAIL:]}")
    return {
        "passed": len(passed),
        "passed on CUDA": sum("cuda" in name.lower() for name in passed),
        "failed": len(failed),
        "names of failed": failed,
    }
