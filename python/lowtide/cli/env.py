"""`python -m lowtide env`: everything a bug report needs, without starting CUDA."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

Section = dict[str, str | int | bool | list[str] | None]

# Instructions that decide which compute dtype is fast on this processor.
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "bf16", "sve")
VARIABLES = ("LOWTIDE_", "TORCH", "PYTORCH", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MKL_")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("env", help="print what a bug report needs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if options.json else render(facts))
    return 0


def collect() -> dict[str, Section]:
    """Facts by section; None where a fact does not exist on this machine."""
    return {
        "lowtide": lowtide_facts(),
        "torch": torch_facts(),
        "cuda": cuda_facts(),
        "machine": machine_facts(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES)
        },
    }


def render(facts: dict[str, Section]) -> str:
    lines = []
    for title, section in facts.items():
        lines.append(f"[{title}]")
        for name, value in section.items():
            text = ", ".join(value) if isinstance(value, list) else value
            lines.append(f"{name:<16} {'none' if text in (None, '') else text}")
        lines.append("")
    return "\n".join(lines).rstrip()


def lowtide_facts() -> Section:
    from lowtide import _C

    build = _C.build_info()
    return {
        "version": build["version"],
        "built for torch": build["torch"],
        "built with CUDA": build["cuda_version"] or None,
        "CUDA archs": build["cuda_archs"].split(),
        "compiler": build["compiler"],
        "path": str(Path(_C.__file__).parent),
    }


def torch_facts() -> Section:
    import torch
    import torch.distributed as dist

    backends = ["fake"]
    for name in ("gloo", "nccl", "mpi", "ucc"):
        if getattr(dist, f"is_{name}_available")():
            backends.append(name)
    has_nccl = "nccl" in backends
    return {
        "version": str(torch.__version__),
        "git": torch.version.git_version,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "backends": backends,
        "threads": torch.get_num_threads(),
        "python": f"{platform.python_version()} ({sys.executable})",
    }


def cuda_facts() -> Section:
    """What the CUDA tools say: asking torch would start a context."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = output_of(shutil.which("nvcc") or f"{home}/bin/nvcc", "--version")
    release = re.search(r"release [\d.]+, V([\d.]+)", nvcc)
    gpus = output_of(
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    )
    return {"nvcc": release[1] if release else None, "GPUs": gpus.splitlines()}


def machine_facts() -> Section:
    cpu = read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpu, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpu, re.MULTILINE)
    known = flags[1].split() if flags else []
    memory = re.search(r"^MemTotal:\s*(\d+) kB", read("/proc/meminfo"), re.MULTILINE)
    limit = read("/sys/fs/cgroup/memory.max").strip()
    system = re.search(r'^PRETTY_NAME="(.+)"', read("/etc/os-release"), re.MULTILINE)
    return {
        "system": system[1] if system else platform.system(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "CPU": model[1] if model else platform.machine(),
        "CPU flags": [flag for flag in CPU_FLAGS if flag in known],
        "cores": os.cpu_count(),
        "usable cores": len(os.sched_getaffinity(0)),
        "memory GiB": str(round(int(memory[1]) / 2**20, 1)) if memory else None,
        "memory limit GiB": str(round(int(limit) / 2**30, 1))
        if limit.isdigit()
        else None,
    }


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def output_of(*command: str) -> str:
    """Its output, or "" where the tool is missing or fails."""
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=20
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
