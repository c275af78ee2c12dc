"""What nvcc makes of the kernels for an H100: loads and stores of 16 bytes, registers
that hold everything; and who launches them. No GPU is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

KERNELS = Path(__file__).parents[3] / "csrc" / "ops" / "cuda"
ARCH = "sm_90"
SOURCES = (".h", ".cpp", ".cu", ".cuh")


def test_one_function_launches_every_kernel() -> None:
    """The tests of C++ replace it, to run what decides grids on host threads."""
    sources = KERNELS.parents[1].rglob("*.*")
    text = re.compile(r"<<<|cudaLaunchKernel")
    launching = [
        p for p in sources if p.suffix in SOURCES and text.search(p.read_text())
    ]
    product = [p for p in launching if "phantom" not in p.parts]
    assert product == [KERNELS / "launch.h"]


def test_only_single_instructions_are_for_a_gpu_alone() -> None:
    """Each in a function whose host form the tests of C++ run; all around it is one
    code for both."""
    sources = KERNELS.parents[1].rglob("*.*")
    counts = {
        str(p.relative_to(KERNELS.parents[1])): p.read_text().count("__CUDA_ARCH__")
        for p in sources
        if p.suffix in SOURCES
    }
    found = {name: count for name, count in counts.items() if count}
    assert found == {"ops/cuda/launch.h": 1, "ops/transfer.h": 2}


def entries(name: str, folder: Path) -> dict[str, tuple[str, str]]:
    """{kernel: (its PTX, what ptxas says of it)}"""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    places = os.pathsep.join([str(toolkit), os.environ["PATH"]])
    tools = [shutil.which(program, path=places) for program in ("nvcc", "ptxas")]
    if None in tools:
        pytest.skip("needs nvcc and ptxas")
    nvcc, ptxas = map(str, tools)
    ptx = folder / f"{name}.ptx"
    includes = [f"-I{path}" for path in (KERNELS.parents[1], *include_paths())]
    compiled = subprocess.run(
        [
            *(nvcc, "-std=c++20", "-O3", f"-arch={ARCH}", "-ptx"),
            *("--expt-relaxed-constexpr", *includes),
            *(KERNELS / f"{name}.cu", "-o", ptx),
        ],
        capture_output=True,
        text=True,
    )
    assert compiled.returncode == 0, compiled.stderr
    assembled = subprocess.run(
        [ptxas, "-v", f"-arch={ARCH}", ptx, "-o", folder / "out.cubin"],
        capture_output=True,
        text=True,
        check=True,
    )
    said = assembled.stdout + assembled.stderr
    texts = ptx.read_text().split(".entry ")[1:]
    found = {}
    for text in texts:
        mangled = re.match(r"\w+", text)
        assert mangled is not None
        about = said.split(f"Compiling entry function '{mangled[0]}'")[1]
        kernel = subprocess.check_output(["c++filt", mangled[0]], text=True).strip()
        found[kernel] = (text, about.split("Compiling entry function")[0])
    return found


def spills(about: str) -> list[int]:
    (stores, loads) = re.findall(r"(\d+) bytes spill", about)
    return [int(stores), int(loads)]


def vectors(ptx: str, what: str) -> int:
    """The most bytes that one load, store or addition takes."""
    widths = re.findall(rf"{what}\.global(?:\.add|\.wb)?\.(?:v(\d)\.)?[a-z](\d+)", ptx)
    return max(int(count or 1) * int(bits) // 8 for count, bits in widths)


def test_transfers(tmp_path: Path) -> None:
    kernels = entries("transfer_kernel", tmp_path)
    assert len(kernels) == 18  # 3 x 3 dtypes, copied and added
    for kernel, (ptx, about) in kernels.items():
        assert spills(about) == [0, 0], kernel
        # 16 bytes of the wider type.
        widths = {vectors(ptx, "ld"), vectors(ptx, "st")}
        types = re.findall(r"float|BFloat16|Half", kernel.split("kernel<")[1])
        mixed = types.count("float") == 1
        assert max(widths) == 16, kernel
        assert min(widths) >= (8 if mixed else 16), kernel


def test_clipping(tmp_path: Path) -> None:
    kernels = entries("clipping_kernels", tmp_path)
    assert len(kernels) == 7
    for kernel, (ptx, about) in kernels.items():
        assert spills(about) == [0, 0], kernel
        if "norm_kernel" not in kernel:
            assert vectors(ptx, "ld") == 16, kernel
        if "scale_kernel" in kernel:
            assert vectors(ptx, "st") == 16, kernel


def test_rows(tmp_path: Path) -> None:
    kernels = entries("rows_kernel", tmp_path)
    assert len(kernels) == 3
    for kernel, (ptx, about) in kernels.items():
        assert spills(about) == [0, 0], kernel
        assert vectors(ptx, "atom") == 16, kernel
