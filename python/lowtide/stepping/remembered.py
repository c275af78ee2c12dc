"""What a step may change, as it was: contents of tensors, and which values are where.

[Note: What is remembered]
Tensors are written back in place, so whoever holds one (a unit its shards, a captured
graph its states) still does. Containers get their old values back, so that a state
which did not exist is gone again and one that was replaced is there again. Values that
are neither stay whose they are.
"""

from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSet, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide._sharding.device_steps import device_steps_of
from lowtide._sharding.local_parameter import sharded_of
from lowtide._sharding.unit import units_of
from lowtide.api import abort_step
from lowtide.saving import content
from lowtide.saving.background import Snapshot

_KINDS = (Tensor, Optimizer, MutableMapping, MutableSet, list, deque)
_OTHERS = "others"  # buffers and gradients, which forward and backward write


def abort_keeping_gradients(model: nn.Module) -> None:
    """What ranks gather next is then the same as where a step was undone."""
    kept = [(p, p.grad) for p in model.parameters()]
    abort_step(model)
    for p, gradient in kept:
        p.grad = gradient


class Remembered:
    """Of a model and optimizers on this rank. Copies are in host memory, made as those
    of a save in the background are."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._device_steps = [*filter(None, map(device_steps_of, optimizers))]
        self._containers: list[tuple[Any, Any]] = []  # and what was in it
        self._parts: list[tuple[Tensor, str, Any]] = []  # of tensor subclasses
        self._seen: set[int] = set()
        parameters: dict[int, Tensor] = {id(p): p for p in model.parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                parameters |= {id(p): p for p in map(sharded_of, group["params"])}
        self._gradients = [(p, p.grad) for p in parameters.values()]
        stepped = [t for optimizer in optimizers for t in self._in(optimizer)]
        others = [
            *(t for m in model.modules() if m._buffers for t in self._in(m._buffers)),
            *(t for _, gradient in self._gradients for t in self._in(gradient)),
        ]
        self._tensors = {content.OPTIMIZER: stepped, _OTHERS: others}
        units = units_of(model.modules())
        where = (*units, *stepped, *others)  # offloaded states are not on the device
        devices = (each.device for each in where if each.device.type != "cpu")
        self.device = next(devices, torch.device("cpu"))
        self._generators = content.generators(self.device)
        self._copies = Snapshot(self._tensors, self.device)

    @torch.no_grad()
    def bring_back(self) -> None:
        self._copies.wait()
        for steps in self._device_steps:
            steps.settle()
        abort_step(self._model)  # drops gradients
        for container, old in self._containers:
            _refill(container, old)
        for tensor, name, part in self._parts:
            if getattr(tensor, name) is not part:
                setattr(tensor, name, part)
        for key, tensors in self._tensors.items():
            for tensor, copy in zip(tensors, self._copies.state[key], strict=True):
                tensor.copy_(copy)
        for p, gradient in self._gradients:
            p.grad = gradient
        content.set_generators(self._generators, self.device)

    def _in(self, value: Any) -> Iterator[Tensor]:
        """All tensors, each once; what holds them is remembered."""
        if isinstance(value, tuple):
            for each in value:
                yield from self._in(each)
            return
        if id(value) in self._seen or not isinstance(value, _KINDS):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            yield from self._in_tensor(value)
            return
        within = vars(value) if isinstance(value, Optimizer) else value
        if isinstance(within, MutableMapping):
            old: Any = {k: v for k, v in within.items() if not _is_of_hooks(k)}
            held = [*old.values()]
        else:
            old = held = [*within]
        self._containers.append((within, old))
        for each in held:
            yield from self._in(each)

    def _in_tensor(self, tensor: Tensor) -> Iterator[Tensor]:
        """Itself, or what one of a subclass, as DTensor, is made of."""
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            if tensor.grad is None:
                return  # frozen
        if not is_traceable_wrapper_subclass(tensor):
            yield tensor
            return
        if not isinstance(tensor, DTensor):
            # What a recipe computes from values goes with them, as torchao's scales.
            self._containers.append((vars(tensor), dict(vars(tensor))))
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            self._parts.append((tensor, name, part))
            yield from self._in(part)


def _is_of_hooks(key: Any) -> bool:
    """Of an optimizer: whoever registers one holds a handle to it."""
    return isinstance(key, str) and key.startswith("_optimizer_")


def _refill(container: Any, old: Any) -> None:
    if isinstance(container, MutableMapping):
        for key in [key for key in container if not _is_of_hooks(key)]:
            del container[key]
        container.update(old)
        return
    container.clear()
    if isinstance(container, MutableSet):
        for value in old:
            container.add(value)
    else:
        container.extend(old)
