"""torch.cuda without a GPU: the stub of cuda_stub.cpp and cuda_stub_kernels.cpp, built
and preloaded into programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = (
    "cuda_stub.cpp",
    "cuda_stub_capture.cpp",
    "cuda_stub_kernels.cpp",
    "cuda_stub_nccl.cpp",
    "cuda_stub_order.cpp",
)


@dataclass(frozen=True)
class CudaStub:
    """Runs programs that see one device."""

    library: Path

    def run(
        self,
        program: Sequence[str | Path],
        *,
        memory: int,
        events: str,
        conf: str = "",
        statuses: Sequence[int] = (0,),
    ) -> str:
        """What the Python program printed. ``memory``: bytes of the device; ``events``:
        "immediate" or "at_sync"; ``conf``: PYTORCH_ALLOC_CONF; ``statuses``: how it may
        end."""
        foreign = ("CUDA", "PYTORCH")
        keep = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *map(str, program)],
            env=keep
            | {
                "CUDA_STUB_EVENTS": events,
                "CUDA_STUB_MEMORY": str(memory),
                "LD_PRELOAD": str(self.library),
                "PYTORCH_ALLOC_CONF": conf,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode in statuses, done.stdout + done.stderr
        return done.stdout


def build_cuda_stub(folder: Path) -> CudaStub:
    """Compiles it with the CUDA headers of torch's wheel, a second of work."""
    library = folder / "libcuda.so.1"
    site = Path(torch.__file__).parents[1]
    (header,) = site.glob("nvidia/cu*/include/cuda_runtime_api.h")
    headers = (f"-I{header.parent}", f"-I{site / 'nvidia/nccl/include'}")
    options = ("-std=c++20", "-O1", "-fPIC", *headers)
    objects = []
    for source in (Path(__file__).with_name(name) for name in SOURCES):
        objects.append(folder / f"{source.stem}.o")
        _compile(*options, "-c", str(source), "-o", str(objects[-1]))
    rest = folder / "rest.s"
    rest.write_text(
        '.section .note.GNU-stack,"",@progbits\n.text\n'
        + "".join(map(_succeeds, sorted(_missing(objects))))
    )
    _compile(
        *options,
        *("-shared", f"-Wl,-soname,{library.name}", *map(str, objects), str(rest)),
        *("-o", str(library)),
    )
    return CudaStub(library)


def _compile(*arguments: str) -> None:
    subprocess.run([os.environ.get("CXX", "c++"), *arguments], check=True)


def _missing(objects: Sequence[Path]) -> set[str]:
    """Functions of cuBLAS and NCCL that torch calls, and of the driver that its NVRTC
    library wants to find, without those the stub has."""
    libraries = Path(torch.__file__).parent / "lib"
    wanted = {
        name
        for library, prefix in (
            ("torch_cuda", "cublas"),
            ("torch_cuda", "nccl"),
            ("caffe2_nvrtc", "cu"),
        )
        for name in _symbols("-Du", libraries / f"lib{library}.so")
        if name.startswith(prefix) and not name.startswith("cuda")
    }
    return wanted - {name for path in objects for name in _symbols("-g", path)}


def _symbols(option: str, path: Path) -> list[str]:
    listing = subprocess.run(
        ["nm", option, str(path)], check=True, capture_output=True, text=True
    ).stdout
    return [line.split()[-1].split("@")[0] for line in listing.splitlines()]


def _succeeds(name: str) -> str:
    return (
        f".globl {name}\n.type {name}, @function\n{name}: jmp cuda_stub_succeed@PLT\n"
    )
