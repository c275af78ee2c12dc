"""Which modules and parameters one ``fully_shard`` call manages; FSDP2's rules."""

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide._base.classes import class_name

# The attribute that a module keeps the state of its unit in.
UNIT_STATE = "_lowtide_state"


@dataclasses.dataclass
class ManagedParameter:
    """A parameter and every place it is registered within the unit."""

    parameter: nn.Parameter
    slots: list[tuple[nn.Module, str]]
    placement: Shard | None = None  # as the program says


def managed_modules(roots: tuple[nn.Module, ...]) -> list[nn.Module]:
    """``roots`` and their descendants, except what earlier calls manage, and what
    torch's ``replicate`` does."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in found or (module not in roots and is_unit(module)):
            return
        if is_replicated(module):
            return
        found[module] = None
        for child in module.children():
            visit(child)

    for root in roots:
        visit(root)
    return list(found)


def is_unit(module: nn.Module) -> bool:
    """Whether ``module`` was passed to ``fully_shard``."""
    return UNIT_STATE in module.__dict__


def is_replicated(module: nn.Module) -> bool:
    """Whether one of torch's ``replicate`` functions was called on ``module``."""
    return "replicate" in (_get_registry(module) or ())


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


def require_initialized(
    roots: Iterable[nn.Module], managed: Iterable[ManagedParameter], who: str
) -> None:
    """Raises for lazy modules, whose parameters have no shape before the first
    forward."""
    places = {item.slots[0] for item in managed if is_lazy(item.parameter)}
    lazy = [
        (f"{path}.{name}" if path else name, class_name(module))
        for root in roots
        for path, module in root.named_modules()
        for name in module._parameters
        if (module, name) in places
    ]
    if lazy:
        raise ValueError(
            f"lowtide: {who}: expected parameters with shapes, got "
            f"{', '.join(f'{path} of a {kind}' for path, kind in lazy)} without. Run a "
            "forward with a batch of the right shape before."
        )


def require_device_type(managed: Iterable[ManagedParameter], device_type: str) -> None:
    """Raises for a ``DTensor`` on a mesh of other devices than those to shard over."""
    for item in managed:
        if not isinstance(item.parameter, DTensor):
            continue
        found = item.parameter.device_mesh.device_type
        if found != device_type:
            module, name = item.slots[0]
            raise ValueError(
                f"lowtide: {class_name(module)}.{name}: expected a DTensor on a mesh "
                f"of {device_type}, as the one that fully_shard was given, got one of "
                f"{found}. Make both meshes of one device type."
            )


def check_shardable(managed: ManagedParameter) -> None:
    module, name = managed.slots[0]
    who = f"{class_name(module)}.{name}"
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
        if tensor.device == device or tensor.is_meta:
            continue
        if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor):
            with torch.no_grad():  # `.data` would not reach the tensors inside
                moved = tensor.to(device)
                if isinstance(tensor, nn.Parameter):
                    moved = nn.Parameter(moved, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)
        else:
            tensor.data = tensor.to(device)
