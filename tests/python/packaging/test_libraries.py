"""The libraries: what they may refer to, and that CUDA is in the one that has it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide import _C

PACKAGE = Path(lowtide.__file__).parent
CORE = PACKAGE / "liblowtide_core.so"
PHANTOM = PACKAGE / "liblowtide_phantom.so"


def dynamic_symbols(*options: str, library: Path = CORE) -> list[str]:
    listing = subprocess.run(
        ["nm", "-D", *options, str(library)], check=True, capture_output=True, text=True
    ).stdout
    return [line.split()[-1] for line in listing.splitlines()]


def needed_libraries(library: Path = CORE) -> list[str]:
    header = subprocess.run(
        ["objdump", "-p", str(library)], check=True, capture_output=True, text=True
    ).stdout
    return [line.split()[1] for line in header.splitlines() if "NEEDED" in line]


@pytest.mark.parametrize("library", [CORE, PHANTOM], ids=lambda path: path.stem)
def test_library_needs_no_python(library):
    undefined = dynamic_symbols("-u", library=library)
    assert any("c10" in symbol for symbol in undefined)  # nm did list something
    assert [s for s in undefined if s.startswith(("Py", "_Py"))] == []


@pytest.mark.parametrize("library", [CORE, PHANTOM], ids=lambda path: path.stem)
def test_library_does_not_link_libpython_or_torch_python(library):
    needed = needed_libraries(library)
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "python" in name]


def test_core_does_not_need_the_simulator():
    assert "liblowtide_core.so" in needed_libraries(PHANTOM)
    assert "liblowtide_phantom.so" not in needed_libraries(CORE)
    assert "liblowtide_phantom.so" not in needed_libraries(Path(_C.__file__))


def test_version_has_one_source():
    assert _C.build_info()["version"] == lowtide.__version__


def test_cuda_is_compiled_and_linked_where_nvcc_exists():
    """The whole suite runs without a GPU, so only the build can tell."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    expected = bool(
        nvcc and torch.version.cuda and os.environ.get("LOWTIDE_CUDA") != "OFF"
    )
    assert _C.build_info()["cuda"] is expected
    assert bool(_C.build_info()["cuda_archs"]) is expected
    assert ("libc10_cuda.so" in needed_libraries()) is expected
    linked = [s for s in dynamic_symbols("-u") if s.startswith("_ZN3c104cuda")]
    assert bool(linked) is expected
