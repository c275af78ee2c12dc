"""The libraries: what they may refer to, and that CUDA is in the one that has it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import lowtide
import wheels
from lowtide import _C

PACKAGE = Path(lowtide.__file__).parent
CORE = PACKAGE / "liblowtide_core.so"


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


def test_core_needs_no_python():
    undefined = dynamic_symbols("-u")
    assert any("c10" in symbol for symbol in undefined)  # nm did list something
    assert [s for s in undefined if s.startswith(("Py", "_Py"))] == []


def test_core_does_not_link_libpython_or_torch_python():
    needed = needed_libraries()
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "python" in name]


@pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")
def test_dry_driver_is_linked_by_nobody_and_needs_no_torch():
    driver = PACKAGE / "liblowtide_cuda_dry.so"
    assert not [name for name in needed_libraries(driver) if "torch" in name]
    for library in (CORE, Path(_C.__file__)):
        assert not [name for name in needed_libraries(library) if "dry" in name]


@pytest.mark.parametrize("library", sorted(PACKAGE.glob("*.so")), ids=lambda p: p.name)
def test_runs_with_the_libraries_of_its_wheels_policy(library):
    """Wheels are held to it, too; here with whatever compiler this is."""
    assert wheels.undefined_names(library)
    assert wheels.too_new(library) == []


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("memcpy@GLIBC_2.14", True),
        ("dlsym@GLIBC_2.34", False),
        ("_ZSt28__throw_bad_array_new_lengthv@GLIBCXX_3.4.29", False),
        ("_ZSt28__throw_bad_array_new_lengthv", False),  # torch happens to have it
        ("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv", True),
        ("_ZN3c105ErrorD1Ev", True),
        ("cudaMalloc@libcudart.so.13", True),
        ("__tls_get_addr@GLIBC_PRIVATE", False),
    ],
)
def test_policy_is_read_from_versions_of_symbols(name, allowed):
    assert wheels.allowed(name) is allowed


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
