"""Which modules and parameters one ``fully_shard`` call manages; FSDP2's rules."""

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn


@dataclasses.dataclass
class ManagedParameter:
    """A parameter and every place it is registered within the unit."""

    parameter: nn.Parameter
    slots: list[tuple[nn.Module, str]]


def managed_modules(roots: tuple[nn.Module, ...]) -> list[nn.Module]:
    """``roots`` and their descendants, except what earlier calls manage."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in found or (module not in roots and is_unit(module)):
            return
        found[module] = None
        for child in module.children():
            visit(child)

    for root in roots:
        visit(root)
    return list(found)


def is_unit(module: nn.Module) -> bool:
    from lowtide._state.unit import unit_state

    return unit_state(module) is not None


def managed_parameters(
    modules: Iterable[nn.Module], ignored: set[nn.Parameter]
) -> list[ManagedParameter]:
    """The parameters of ``modules`` in registration order, each once."""
    found: dict[int, ManagedParameter] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            managed = found.setdefault(id(parameter), ManagedParameter(parameter, []))
            managed.slots.append((module, name))
    return list(found.values())


def check_shardable(managed: ManagedParameter) -> None:
    module, name = managed.slots[0]
    who = f"{type(module).__name__}.{name}"
    parameter = managed.parameter
    if parameter.dim() == 0:
        raise ValueError(
            f"lowtide: {who}: expected a parameter with at least one dimension to "
            "shard, got a scalar. Make it a 1-D tensor with one element."
        )
    if not parameter.is_contiguous():
        raise NotImplementedError(
            f"lowtide: {who}: expected a contiguous parameter, got strides "
            f"{tuple(parameter.stride())} for shape {tuple(parameter.shape)}. "
            "Call .contiguous() on it before fully_shard."
        )


def move_to_device(
    modules: Iterable[nn.Module],
    parameters: Iterable[ManagedParameter],
    device: torch.device,
) -> None:
    """Moves parameters and buffers to the mesh's device, meta tensors excepted."""
    tensors: list[torch.Tensor] = [managed.parameter for managed in parameters]
    tensors += [
        buffer for module in modules for buffer in module.buffers(recurse=False)
    ]
    for tensor in tensors:
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.to(device)
