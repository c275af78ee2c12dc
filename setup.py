"""Thin driver of CMake, which is the only build description (CMakeLists.txt)."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

OPTIONS = (
    *("LOWTIDE_CUDA", "LOWTIDE_CUDA_ARCHS", "LOWTIDE_UNITY", "LOWTIDE_WERROR"),
    "LOWTIDE_LOCAL_VERSION",
)
# Who installs compiles everything once, and that is the faster way.
DEFAULTS = {"LOWTIDE_UNITY": "ON"}


class WheelInfo(egg_info):
    """Of a wheel for others (tools/wheels.py) version and requirement name the torch
    that it is for: LOWTIDE_LOCAL_VERSION is +cu130torch2.11, say."""

    def finalize_options(self) -> None:
        if local := os.environ.get("LOWTIDE_LOCAL_VERSION"):
            self.tag_build = local
            minor = local.rpartition("torch")[2]
            others = [
                each
                for each in self.distribution.install_requires
                if not each.startswith("torch")
            ]
            requirements = [f"torch=={minor}.*", *others]
            self.distribution.install_requires = requirements
            self.distribution.metadata.install_requires = requirements
        super().finalize_options()


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        source = Path(__file__).parent
        build = Path(self.build_temp).resolve()
        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        cmake, ninja = tool("cmake"), tool("ninja")
        given = DEFAULTS | os.environ
        options = [f"-D{name}={given[name]}" for name in OPTIONS if name in given]
        run_cmake(
            [
                *(cmake, "-S", str(source), "-B", str(build), "-G", "Ninja"),
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
                f"-DPython_EXECUTABLE={sys.executable}",
                *options,
            ]
        )
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
        run_cmake([cmake, "--build", str(build), "-j", jobs])
        run_cmake([cmake, "--install", str(build), "--prefix", str(package.parent)])


def tool(name: str) -> str:
    """The tool of this environment, which need not be on PATH, or the system's."""
    scripts = sysconfig.get_path("scripts")
    path = shutil.which(name, path=os.pathsep.join([scripts, os.environ["PATH"]]))
    if path is None:
        raise SystemExit(
            f"lowtide: {name}: expected it in {scripts} or PATH, got none. "
            f"Run `{sys.executable} -m pip install {name}`."
        )
    return path


def run_cmake(command: list[str]) -> None:
    """Runs it; if it fails with a message of ours, ends with that one line."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        ours = re.search(r"lowtide: .*(?:\n  .*)*", done.stderr)
        raise SystemExit(
            " ".join(ours[0].split())  # CMake wraps lines
            if ours
            else f"lowtide: build: expected `{' '.join(command)}` to succeed, got exit "
            f"status {done.returncode}. Its first error is above."
        )


setup(
    ext_modules=[Extension("lowtide._C", [])],
    cmdclass={"build_ext": CMakeBuild, "egg_info": WheelInfo},
)
