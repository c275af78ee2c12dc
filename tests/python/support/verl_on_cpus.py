"""verl's trainers and engines on the CPUs of a gloo group.

verl takes other accelerators by a plugin: CPUs are one here. Ray, the readers of data
sets and the servers of rollouts, which it imports and an engine does not use, are
stood in for. Engines, workers, the trainer and checkpoints are its own.

    verl_on_cpus.py SCRIPT [ARG...]     in the environment that torchrun makes
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

FOLDER = Path(sys.prefix) / "verl"  # of requirements/verl.txt, by the Makefile
MISSING = f"expected verl in {FOLDER}, got none: `make dev` on Python < 3.13"
ABSENT = ("ray", "datasets", "pandas", "uvicorn", "fastapi")


class _Absent(types.ModuleType):
    """Has every class, and every module, that is asked for."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, type(name, (), {}))
        return vars(self)[name]


class _AbsentOnes(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "ray":
            module.remote = _remote


def is_here() -> bool:
    there = FOLDER / "verl"
    return there.is_dir() or importlib.util.find_spec("verl") is not None


def _remote(*of: Any, **settings: Any) -> Any:
    return of[0] if of else lambda function: function


def stand_in_for_absent() -> None:
    """Before the first import of verl in a process."""
    if not any(isinstance(finder, _AbsentOnes) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AbsentOnes())
        # Before the transformers of the other tests, which verl does not take; the
        # first place is the script's.
        sys.path.insert(1, str(FOLDER))


def prepare() -> None:
    """Before the first import of verl in a process."""
    stand_in_for_absent()
    if "verl" in sys.modules:
        return
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # whose engine is taken
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpus(PlatformCUDA):
        device_name = "cpu"
        device_module = types.SimpleNamespace(
            is_available=lambda: False,
            empty_cache=lambda: None,
            set_device=lambda device: None,
            get_rng_state=torch.get_rng_state,
            set_rng_state=torch.set_rng_state,
            mem_get_info=lambda: (0, 0),
            get_device_name=lambda: "CPU",
            max_memory_allocated=lambda: 0,
            max_memory_reserved=lambda: 0,
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
        )

        def current_device(self) -> Any:
            return torch.device("cpu")

        def communication_backend_name(self) -> str:
            return "gloo"

    set_platform(Cpus())
    from verl.utils import distributed

    distributed.initialize_global_process_group = _join
    from verl.workers.engine.fsdp import transformer_impl

    # Page-locked memory is the accelerators'.
    transformer_impl.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(False)


def packed_attention() -> str:
    """The name of an attention that goes where flash-attention would, through verl's
    exchange of sequence and heads, and computes texts behind each other one by one."""
    from transformers import AttentionInterface
    from transformers.integrations.flash_attention import flash_attention_forward
    from verl.models.transformers import monkey_patch

    def packed(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        position_ids: torch.Tensor,
        **settings: Any,
    ) -> torch.Tensor:
        starts = (position_ids.flatten() == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], query.size(1)]
        texts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[:, start:end].transpose(1, 2) for x in (query, key, value)),
                is_causal=True,
                enable_gqa=True,
            ).transpose(1, 2)
            for start, end in zip(starts, ends, strict=True)
        ]
        return torch.cat(texts, dim=1)

    monkey_patch._flash_attention_forward = packed
    AttentionInterface.register("packed", flash_attention_forward)
    return "packed"


def _join(*args: Any, **settings: Any) -> tuple[int, int, int]:
    """verl's own names the device's and the CPU's backend, which are one."""
    dist.init_process_group("gloo")
    return 0, dist.get_rank(), dist.get_world_size()


if __name__ == "__main__":
    prepare()
    # All ranks print a lot: a line of one is not to end in the middle of another's.
    sys.stdout.reconfigure(line_buffering=True)
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
