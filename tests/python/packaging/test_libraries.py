"""The two binaries: what they may refer to, and that CUDA is in them."""

import os
import shutil
import subprocess
from pathlib import Path

import torch

import lowtide
from lowtide import _C

CORE = Path(lowtide.__file__).parent / "liblowtide_core.so"


def dynamic_symbols(*options: str) -> list[str]:
    listing = subprocess.run(
        ["nm", "-D", *options, str(CORE)], check=True, capture_output=True, text=True
    ).stdout
    return [line.split()[-1] for line in listing.splitlines()]


def needed_libraries() -> list[str]:
    header = subprocess.run(
        ["objdump", "-p", str(CORE)], check=True, capture_output=True, text=True
    ).stdout
    return [line.split()[1] for line in header.splitlines() if "NEEDED" in line]


def test_core_library_needs_no_python():
    undefined = dynamic_symbols("-u")
    assert any("c10" in symbol for symbol in undefined)  # nm did list something
    assert [s for s in undefined if s.startswith(("Py", "_Py"))] == []


def test_core_library_does_not_link_libpython_or_torch_python():
    needed = needed_libraries()
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "python" in name]


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
