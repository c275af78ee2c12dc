"""Builds lowtide for this GPU, runs the tests that have CUDA instantiations, and the
kernels and a small training step under compute-sanitizer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bars
from bars import row, with_bar
from case import Row
from launch import ENVIRONMENT
from prerequisites import of_toolkit, the_gpu, tool, torch_for_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "gpu"
# Rooms of tests/cpp with tests on CUDA.
ROOMS = ("device", "ops")
LIMIT = 540
NO_GTEST = (
    "GoogleTest was not found; install libgtest-dev, or set "
    "FETCHCONTENT_SOURCE_DIR_GOOGLETEST to its sources"
)
NO_SANITIZER = "compute-sanitizer is neither on PATH nor in the CUDA toolkit"
CHECKERS = ("memcheck", "racecheck")

Figures = dict[str, Any]


def execute(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(command),
        cwd=REPOSITORY,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def checked(command: Sequence[str]) -> str:
    done = execute(command)
    if done.returncode != 0:
        text = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{text}")
    return done.stdout


def configure(with_tests: bool, arch: str) -> list[str]:
    gtest = os.environ.get("FETCHCONTENT_SOURCE_DIR_GOOGLETEST")
    return [
        *(tool("cmake"), "-S", ".", "-B", str(BUILD), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        *("-DLOWTIDE_CUDA=ON", f"-DLOWTIDE_CUDA_ARCHS={arch}"),
        f"-DLOWTIDE_TESTS={'ON' if with_tests else 'OFF'}",
        *([f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={gtest}"] if gtest else []),
    ]


@dataclass(frozen=True)
class Build:
    name: str = "build"
    what: str = "lowtide for this GPU, with the C++ tests that have CUDA instantiations"
    seconds: int = 120

    def run(self) -> Figures:
        properties = the_gpu(torch_for_cuda(), any_gpu=True)
        arch = f"{properties.major}.{properties.minor}"
        has_tests = execute(configure(True, arch)).returncode == 0
        if not has_tests:
            checked(configure(False, arch))
        targets = [f"{room}_test" for room in ROOMS] if has_tests else []
        jobs = str(os.cpu_count() or 1)
        build = (tool("cmake"), "--build", str(BUILD), "-j", jobs, "--target")
        checked([*build, "_C", "_phantom", *targets])
        install = (tool("cmake"), "--install", str(BUILD), "--prefix", "python")
        checked(install)
        return {"arch": arch, "tests": has_tests}

    def rows(self, figures: Figures) -> Iterator[Row]:
        quantity = "built for compute capability"
        yield row("lowtide", quantity, float(figures["arch"]), "", "measured")


@dataclass(frozen=True)
class CppTests:
    """ctest, with what GoogleTest says of each test."""

    name: str = "tests"
    what: str = "ctest of the rooms with CUDA instantiations"
    seconds: int = 30

    def run(self) -> Figures:
        if not Path(BUILD, f"{ROOMS[0]}_test").exists():
            return {"missing": NO_GTEST}
        ctest = Path(sysconfig.get_path("scripts"), "ctest")
        program = str(ctest) if ctest.exists() else tool("ctest")
        rooms = "|".join(ROOMS)
        done = execute(
            [
                *(program, "--test-dir", str(BUILD), "--verbose"),
                *("--no-tests=error", "-R", f"^cpp\\.({rooms})$"),
            ]
        )
        return counts(done.stdout, done.returncode)

    def rows(self, figures: Figures) -> Iterator[Row]:
        if "missing" in figures:
            quantity = "C++ tests on CUDA that passed"
            yield row("lowtide", quantity, None, "", "missing", figures["missing"])
            return
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
        raise RuntimeError(f"ctest: exit {returncode}\n{text[-4000:]}")
    return {
        "passed": len(passed),
        "passed on CUDA": sum("cuda" in name.lower() for name in passed),
        "failed": len(failed),
        "names of failed": failed,
    }


@dataclass(frozen=True)
class Sanitizer:
    name: str = "sanitizer"
    what: str = "compute-sanitizer on the kernels' tests and on a small training step"
    seconds: int = 60

    def run(self) -> Figures:
        sanitizer = of_toolkit("compute-sanitizer")
        if sanitizer is None:
            return {"missing": NO_SANITIZER}
        figures: Figures = {"errors": {}}
        tests = Path(BUILD, "ops_test")
        if tests.exists():
            for checker in CHECKERS:
                command = [str(tests), "--gtest_filter=*cuda*"]
                found = self.errors([sanitizer, "--tool", checker, *command])
                figures["errors"][f"{checker}, kernels"] = found
        programs = REPOSITORY / "benchmarks" / "programs"
        step = (str(programs / "llama_memory.py"), "--device", "cuda")
        small = ("--config", "tiny", "--sequence", "64", "--loss", "vocabulary")
        command = [sys.executable, *step, *small]
        found = self.errors([sanitizer, "--tool", "memcheck", *command])
        figures["errors"]["memcheck, training step"] = found
        return figures

    def errors(self, command: Sequence[str]) -> int:
        done = execute(command, ENVIRONMENT)
        return summary(done.stdout + done.stderr, done.returncode)

    def rows(self, figures: Figures) -> Iterator[Row]:
        if "missing" in figures:
            quantity = "compute-sanitizer: errors"
            yield row("lowtide", quantity, None, "", "missing", figures["missing"])
            return
        for what, errors in figures["errors"].items():
            yield from with_bar(f"compute-sanitizer: errors, {what}", errors, bars.NONE)


def summary(text: str, returncode: int) -> int:
    """memcheck counts errors, racecheck hazards; a program that failed by itself is not
    an answer."""
    pattern = r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard"
    found = [int(a or b) for a, b in re.findall(pattern, text)]
    if returncode != 0 and not any(found):
        raise RuntimeError(f"compute-sanitizer: exit {returncode}\n{text[-4000:]}")
    if not found:
        raise RuntimeError(f"compute-sanitizer: no summary\n{text[-4000:]}")
    return sum(found)
