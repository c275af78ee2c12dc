"""Writes the dry driver's functions that are the same for many names.

    nvidia_functions.py OUT.cpp TORCH_LIB NVIDIA_ROOT

Every function that NVIDIA's libraries beside torch export, or that cuda.h declares,
gets a weak definition, so that none of the real ones is ever reached; what
csrc/phantom/driver defines takes its place when it is linked. What such a definition
does follows from who wants it and from its declaration:

  makes something         writes a new handle (cusolverDnCreate)
  says how large          writes 0 to each size (cusolverDnSgeqrf_bufferSize)
  says whether it did     writes 0 and computes (cublasSgeqrfBatched)
  says which stream       is remembered (cublasSetStream)
  computes, and torch calls it            succeeds; takes time
  sets or destroys, and torch calls it    succeeds
  has nothing to do (SUCCEED)             succeeds
  anything else           ends in lowtide_dry_missing with its name
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# (library, error status of what is missing, headers that declare makers and sizes)
LIBRARIES = {
    "cublas": (15, ("cublas_api.h",)),
    "cublasLt": (15, ("cublasLt.h",)),
    "cudart": (801, ()),
    "cudnn": (3000, ("cudnn.h",)),
    "cufft": (16, ("cufft.h", "cufftXt.h")),
    "cufile": (5001, ()),
    "cupti": (999, ()),
    "curand": (999, ("curand.h",)),
    "cusolver": (9, ("cusolverDn.h",)),
    "cusparse": (10, ("cusparse.h",)),
    "cusparseLt": (10, ("cusparseLt.h",)),
    "nccl": (5, ()),
}
DRIVER_MISSING = 801  # CUDA_ERROR_NOT_SUPPORTED
USERS = ("torch_cuda", "c10_cuda", "torch_cuda_linalg", "caffe2_nvrtc", "torch_cpu")
# Pure functions of a status, which the real libraries answer.
PURE = re.compile(r"Error(String|Name)$|Status(String|Name)$")
MAKERS = re.compile(r"Create|_createDescr$")
SIZES = re.compile(r"[sS]ize|MakePlan|workEstimation|SpGEMM_compute|GetWorkspace$")
# Whose info is on the host; that of others is the device's.
INFORMING = re.compile(r"^cublas[SDCZ](geqrf|getrs|gels)Batched$")
STREAMS = re.compile(r"^(cublas|cudnn|cufft|cusolverDn|cusparse)SetStream(_v2)?$")
COMPUTING = re.compile(r"^(cublas|cudnn|cufft|cusolver|cusparse(?!Lt))")
# Of CUDA's runtime and driver, whatever their version.
SUCCEED = set(
    """
    cudaDeviceDisablePeerAccess cudaDeviceEnablePeerAccess cudaDeviceReset
    cudaDeviceSetCacheConfig cudaDeviceSetLimit cudaFuncSetAttribute
    cudaFuncSetCacheConfig cudaGetLastError cudaGraphUpload
    cudaIpcCloseMemHandle cudaMemPoolSetAccess cudaMemPoolSetAttribute
    cudaMemPoolTrimTo cudaPeekAtLastError cudaProfilerStart cudaProfilerStop
    cudaSetDeviceFlags cudaStreamDestroy cudaStreamQuery
    cuCtxSetLimit cuDevicePrimaryCtxRelease cuFuncSetAttribute cuFuncSetCacheConfig
    cuGreenCtxDestroy cuInit cuLibraryUnload cuLinkAddData cuLinkDestroy cuMemMap
    cuMemSetAccess cuModuleUnload cuMulticastAddDevice cuMulticastBindMem
    cuMulticastUnbind cuStreamWriteValue32
    """.split()
)
# What the names of functions have that a library's handle does not compute with.
SETTING = re.compile(r"Set|[dD]estroy|Finalize|Descriptor|AutoAllocation")
RESULTS = re.compile(
    r"Create|InitAll|Shrink|Grow|Signal|Get|Size|Find|Query|Search|Nnz|zeroPivot|Init$"
    r"|AddNode|CaptureToGraph|LibraryLoad"
)
# Its structures are the caller's, and nothing reads what would be in them.
OF_CALLERS = "cusparseLt"


def main(out: Path, torch_lib: Path, nvidia: Path) -> None:
    wanted = {
        name for user in USERS for name in symbols(torch_lib / f"lib{user}.so", "-u")
    }
    lines = [
        '#include "phantom/driver/device.h"',
        '#include "phantom/driver/library_calls.h"',
    ]
    lines += [
        f"#include <{header}>"
        for _, headers in LIBRARIES.values()
        for header in headers
        if list(nvidia.glob(f"*/include/{header}"))
    ]
    lines.append('extern "C" {')
    trivial = {}  # name: error status, or 0
    for library, (missing, headers) in LIBRARIES.items():
        exported = exports(nvidia, library)
        declared = declarations(nvidia, headers)
        for name in sorted(exported):
            body = with_results(name, declared.get(name, ""))
            if name in wanted and body:
                lines.append(f"__attribute__((weak)) {declared[name]} {{ {body} }}")
            else:
                returns = library != OF_CALLERS and RESULTS.search(name)
                computes = name in wanted and not returns
                trivial[name] = 0 if computes or name in SUCCEED else missing
    for name in driver_functions(nvidia):
        plain = re.sub(r"_v\d$", "", name)
        trivial[name] = 0 if plain in SUCCEED else DRIVER_MISSING
    lines.append("}")
    out.write_text("\n".join(lines) + "\n")
    # Without their headers: any type stands for theirs.
    out.with_stem(out.stem + "_rest").write_text(rest(trivial))


def with_results(name: str, declaration: str) -> str:
    """Statements; none for a function without results of these kinds."""
    if not declaration:
        return ""
    inside = declaration[declaration.find("(") + 1 : declaration.rfind(")")]
    parameters = [" ".join(p.split()) for p in inside.split(",")]
    outputs = [
        (p[: p.rindex("*")].strip(), p[p.rindex("*") + 1 :].strip())
        for p in parameters
        if p.count("*") == 1 and "const" not in p
    ]
    if MAKERS.search(name):
        made = [n for kind, n in outputs if re.fullmatch(r"\w+(_t|Handle)", kind)]
        return f"lowtide::dry::make_handle({made[0]}); return {{}};" if made else ""
    if INFORMING.search(name):
        computed = f'return static_cast<cublasStatus_t>(lowtide_dry_computes("{name}", '
        return f"*info = 0; {computed}handle));"
    if SIZES.search(name):
        sizes = [
            n
            for kind, n in outputs
            if kind == "size_t"
            or (kind in ("int", "size_t", "int64_t") and re.search("work|[sS]ize", n))
        ]
        body = "".join(f"if ({n}) *{n} = 0; " for n in sizes)
        return body and f"{body}return {{}};"
    return ""


def rest(trivial: dict[str, int]) -> str:
    lines = [
        '#include "phantom/driver/library_calls.h"',
        '#include "phantom/driver/missing.h"',
        'extern "C" {',
    ]
    for name, status in sorted(trivial.items()):
        takes, does = "", "0"
        if status:
            does = f'lowtide_dry_missing("{name}", {status})'
        elif STREAMS.search(name):
            takes, does = "void* h, void* s", "lowtide_dry_set_stream(h, s)"
        elif COMPUTING.search(name) and not SETTING.search(name):
            takes, does = "void* h", f'lowtide_dry_computes("{name}", h)'
        lines.append(f"__attribute__((weak)) int {name}({takes}) {{ return {does}; }}")
    return "\n".join([*lines, "}"]) + "\n"


def exports(nvidia: Path, library: str) -> set[str]:
    found = sorted(nvidia.glob(f"*/lib/lib{library}.so*"))
    names = symbols(found[0], "--defined-only") if found else []
    return {
        name
        for name in names
        if re.match(r"_*(cu|nccl)\w+$", name) and not PURE.search(name)
    }


def declarations(nvidia: Path, headers: Iterable[str]) -> dict[str, str]:
    """{function: its declaration, without API marks}; none of a library that this
    torch does without"""
    found = {}
    for path in [p for header in headers for p in nvidia.glob(f"*/include/{header}")]:
        texts = [path.read_text(errors="replace")]
        for part in re.findall(r'#include [<"](cudnn_\w+\.h)[>"]', texts[0]):
            texts.append((path.parent / part).read_text(errors="replace"))
        for text in texts:
            text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
            pattern = r"(\w+_t|cufftResult)\s+\w+API\s+(\w+)\s*\(([^;]*?)\)\s*;"
            for result, name, inside in re.findall(pattern, text):
                found[name] = f"{result} {name}({' '.join(inside.split())})"
    return found


def driver_functions(nvidia: Path) -> set[str]:
    (path,) = nvidia.glob("cu*/include/cuda.h")
    text = path.read_text()
    names = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", text))
    return names | set(re.findall(r"#\s*define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+_v\d)", text))


def symbols(library: Path, kind: str) -> list[str]:
    if not library.exists():
        return []
    listing = subprocess.run(
        ["nm", "-D", kind, str(library)], check=True, capture_output=True, text=True
    ).stdout
    return [line.split()[-1].split("@")[0] for line in listing.splitlines()]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
