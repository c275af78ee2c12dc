"""The two binaries: what they may refer to, and that CUDA is in them."""

import subprocess
from pathlib import Path

import lowtide
from lowtide import _C

CORE = Path(lowtide.__file__).parent / "liblowtide_core.so"


def dynamic_symbols(*options: str) -> list[str]:
    listing = subprocess.run(
        ["nm", "-D", *options, str(CORE)], check=True, capture_output=True, text=True
    ).stdout
    return [line.split()[-1] for line in listing.splitlines()]


def test_core_library_needs_no_python():
    undefined = dynamic_symbols("-u")
    assert any("c10" in symbol for symbol in undefined)  # nm did list something
    assert [s for s in undefined if s.startswith(("Py", "_Py"))] == []


def test_core_library_does_not_link_libpython_or_torch_python():
    header = subprocess.run(
        ["objdump", "-p", str(CORE)], check=True, capture_output=True, text=True
    ).stdout
    needed = [line.split()[1] for line in header.splitlines() if "NEEDED" in line]
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "python" in name]


def test_version_has_one_source():
    assert _C.build_info()["version"] == lowtide.__version__
