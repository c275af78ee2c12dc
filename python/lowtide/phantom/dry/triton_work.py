"""What Triton's kernels do, which no operator says: for the driver's clock.

A kernel reads each of its tensor arguments once, and writes those that inductor lists
as changed once more; of an argument with more elements than the kernel has (a table
that it looks up) it touches as many as it has. FLOPs are known of inductor's templates
of products; other kernels count as bound by memory.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from typing import Any

from . import timekeeper

_HALF = 3  # csrc/phantom/time/machine.h, Rate


@functools.cache
def install() -> None:
    """For the rest of the process: now, or when one of the two modules is imported."""
    for name, watch in _WATCHERS.items():
        if name in sys.modules:
            watch(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def _watch_inductor(module: Any) -> None:
    autotuner = module.CachingAutotuner
    run = autotuner.run

    @functools.wraps(run)
    def run_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not timekeeper.runs():
            return run(self, *args, **kwargs)
        timekeeper.enter(self.inductor_meta.get("kernel_name") or self.fn.__name__)
        try:
            return run(self, *args, **kwargs)
        finally:
            flops = float(self.inductor_meta.get("kernel_flop") or 0)
            timekeeper.leave(flops, _bytes_of_inductor(self, args), _HALF)

    autotuner.run = run_and_tell


def _bytes_of_inductor(kernel: Any, args: Iterable[Any]) -> float:
    hints = kernel.size_hints
    most = math.prod(hints.values()) if isinstance(hints, dict) else math.inf
    if kernel.inductor_meta.get("kernel_num_gb"):
        return float(kernel.inductor_meta["kernel_num_gb"]) * 1e9
    changed = set(kernel.inductor_meta.get("mutated_arg_names", ()))
    total = 0.0
    for name, value in zip(kernel.fn.arg_names, args, strict=False):
        both = name in changed and name.startswith("in_out")
        total += _bytes_of(value, most) * (2 if both else 1)
    return total


def _watch_triton(module: Any) -> None:
    function = module.JITFunction
    run = function.run

    @functools.wraps(run)
    def run_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("warmup") or not timekeeper.runs():
            return run(self, *args, **kwargs)
        timekeeper.enter(self.fn.__name__)
        try:
            return run(self, *args, **kwargs)
        finally:
            values = (*args, *kwargs.values())
            timekeeper.leave(0.0, sum(map(_bytes_of, values)), _HALF)

    function.run = run_and_tell


def _bytes_of(value: Any, most: float = math.inf) -> float:
    """Of ``most`` elements of a tensor on the GPU, or of what a kernel takes for one:
    Triton's and torch's wrappers have no more than this of a tensor's."""
    if not hasattr(value, "element_size") or value.device.type != "cuda":
        return 0.0
    return float(min(math.prod(value.shape), most) * value.element_size())


_WATCHERS = {
    "torch._inductor.runtime.triton_heuristics": _watch_inductor,
    "triton.runtime.jit": _watch_triton,
}


class _Finder(MetaPathFinder):
    """Finds nothing itself; changes the two modules when they have been loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        watch = _WATCHERS.get(name)
        if watch is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Watched(spec.loader, watch)
                return spec
        return None


class _Watched(Loader):
    def __init__(self, loader: Any, watch: Any) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        self._watch(module)
