"""Module paths and parameters of the models a program calls."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy

# What wrappers put into paths.
_WRAPPERS = re.compile(
    r"(?:^|\.)(?:_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(?=\.|$)"
)


@dataclass
class ModuleTable:
    """Finds a model when one of its modules is first called, and keeps it."""

    roots: list[nn.Module] = field(default_factory=list)
    _paths: dict[int, str] = field(default_factory=dict)
    _parameters: dict[str, dict[str, int]] = field(default_factory=dict)

    def path(self, calls: list[nn.Module]) -> str | None:
        """The path of the innermost of ``calls``, which lie inside each other; "" for a
        root, None without one."""
        if not calls:
            return None
        path = self._paths.get(id(calls[0]))
        if path is None:
            self.add(calls[-1])
            # A module that its root does not list: an unregistered child.
            path = next((self._paths[id(m)] for m in calls if id(m) in self._paths), "")
        return path

    def add(self, root: nn.Module) -> None:
        if any(root is known for known in self.roots):
            return
        self.roots.append(root)
        inner = (
            "module." if isinstance(root, nn.parallel.DistributedDataParallel) else ""
        )
        for name, module in root.named_modules():
            path = clean(name.removeprefix("module") if inner else name).lstrip(".")
            self._paths[id(module)] = path
            for own, parameter in module.named_parameters(recurse=False):
                if is_lazy(parameter):
                    continue
                self._parameters.setdefault(path, {})[own] = parameter.numel()

    def parameters_of(self, path: str) -> dict[str, int]:
        """Elements of the parameters that belong to the module itself, all ranks."""
        return self._parameters.get(path, {})

    def parameter_sizes(self) -> dict[str, int]:
        """Elements by full name."""
        return {
            f"{path}.{name}".lstrip("."): numel
            for path, own in self._parameters.items()
            for name, numel in own.items()
        }

    def units(self) -> list[str]:
        """Paths of the modules that fully_shard made units."""
        return [
            self._paths[id(module)]
            for root in self.roots
            for module in root.modules()
            if isinstance(module, FSDPModule)
        ]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for root in self.roots:
            for name, parameter in root.named_parameters():
                yield self._clean(root, name), parameter

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for root in self.roots:
            for name, buffer in root.named_buffers():
                yield self._clean(root, name), buffer

    def _clean(self, root: nn.Module, name: str) -> str:
        if isinstance(root, nn.parallel.DistributedDataParallel):
            name = name.removeprefix("module.")
        return clean(name)


def clean(path: str) -> str:
    """``path`` without what checkpointing and compilation wrappers added."""
    return _WRAPPERS.sub("", path).lstrip(".")
