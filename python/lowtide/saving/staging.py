"""What a load reads, aside: this rank's part of every tensor in host memory, as many
bytes as it has of the model, the optimizer and gradients. Every name, shape and dtype
is compared first."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide._sharding.local_parameter import rows_of
from lowtide._sharding.subclass import made_of
from lowtide.saving import content
from lowtide.saving.content import Live
from lowtide.saving.errors import CheckpointError
from lowtide.saving.placement import Placement, placement_of
from lowtide.saving.verification import Opened

_Names = dict[str, str]  # what something is called here: its name in the checkpoint


@dataclasses.dataclass
class Staged:
    """Values by their names in the checkpoint, and what they are for."""

    placement: Placement
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    # States that the optimizer does not have yet, of whatever class was saved.
    new: set[str] = dataclasses.field(default_factory=set)
    model: _Names = dataclasses.field(default_factory=dict)
    objects: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    gradients: _Names = dataclasses.field(default_factory=dict)
    extra: _Names = dataclasses.field(default_factory=dict)
    # Parameter, then the path in its state.
    state: dict[str, dict[tuple[str, ...], str]] = dataclasses.field(
        default_factory=dict
    )
    # Number of a group or, in torch's flattened form, a parameter; then the key.
    groups: dict[str, _Names] = dataclasses.field(default_factory=dict)
    generators: _Names = dataclasses.field(default_factory=dict)
    # Kind, or "layout"; then the parameter.
    waiting: dict[str, _Names] = dataclasses.field(default_factory=dict)

    def value(self, name: str) -> Any:
        return self.values[name]

    def nested(self, opened: Opened, names: Iterable[str]) -> Any:
        """What has these names in the checkpoint, as it was before DCP flattened it."""
        paths = opened.metadata.planner_data or {}
        flat = {name: self.values[name] for name in names}
        return unflatten_state_dict(flat, {n: paths.get(n, (n,)) for n in flat})


def stage(opened: Opened, of: Live, rank: int, size: int) -> Staged:
    """Empty tensors for all that this rank reads. Raises CheckpointError for what does
    not fit ``of``."""
    staged = Staged(placement_of(opened, of.state))
    _stage_model(staged, opened, of)
    if of.optimizers:
        _stage_optimizer(staged, opened, of)
    known = opened.metadata.state_dict_metadata
    if opened.manifest is None:
        _stage_objects_beside(staged, opened)
        return staged
    for name in known:
        first, _, rest = name.partition(".")
        if first == content.GRADIENTS:
            parameter = _parameter(opened, of, name, rest)
            staged.values[name] = _like(opened, name, parameter)
            staged.gradients[rest] = name
        elif first == content.EXTRA:
            staged.values[name] = _whole(known[name])
            staged.extra[name] = name
    _stage_rank(staged, opened, of, f"{content.OF_LOWTIDE}.rank_{rank}.", size)
    return staged


def _stage_model(staged: Staged, opened: Opened, of: Live) -> None:
    known = opened.metadata.state_dict_metadata
    prefix = staged.placement.model
    objects: dict[str, str] = {}  # parts of them: whose
    for key, value in of.state.items():
        name = prefix + key
        if not isinstance(value, Tensor):
            # DCP saves what is in a dict under names of its own.
            parts = [n for n in known if n == name or n.startswith(f"{name}.")]
            staged.objects[key] = parts
            staged.values.update((part, _whole(known[part])) for part in parts)
            objects |= dict.fromkeys(parts, key)
            if parts:
                continue
        if name not in known:
            raise CheckpointError(
                f"lowtide: load: {opened.folder}: '{name}': expected every tensor of "
                "the model, got none of that name. Pass the model that was saved."
            )
        staged.values[name] = _like(opened, name, value)
        staged.model[key] = name
    others = [name for name in known if prefix and name.startswith(prefix)]
    for name in others:
        if name[len(prefix) :] not in of.state and name not in objects:
            in_optimizer = staged.placement.of_optimizer(name) is not None
            if not in_optimizer:
                raise CheckpointError(
                    f"lowtide: load: {opened.where(name)}: expected a tensor of the "
                    "model, got one it does not have. Pass the model that was saved."
                )


def _stage_optimizer(staged: Staged, opened: Opened, of: Live) -> None:
    if staged.placement.optimizer is None:
        raise CheckpointError(
            f"lowtide: load: {opened.folder}: expected an optimizer's state, got a "
            "checkpoint without. Pass optimizer=None."
        )
    live_states = {
        id(p): state for one in of.optimizers for p, state in one.state.items()
    }
    for name, known in opened.metadata.state_dict_metadata.items():
        rest = staged.placement.of_optimizer(name)
        if rest is None:
            continue
        if rest.startswith("param_groups."):
            group, _, key = rest.removeprefix("param_groups.").rpartition(".")
            staged.groups.setdefault(group, {})[key] = name
            staged.values[name] = _whole(known)
            continue
        key, path = _split(rest.removeprefix("state."), of.parameters)
        parameter = _parameter(opened, of, name, key)
        at: Any = live_states.get(id(parameter), {})
        for part in path:
            at = at.get(part) if isinstance(at, Mapping) else None
        staged.state.setdefault(key, {})[path] = name
        if isinstance(known, BytesStorageMetadata):
            staged.values[name] = None
        elif isinstance(at, Tensor):
            staged.values[name] = _like(opened, name, at)
        else:
            staged.values[name] = _new_state(known, parameter)
            staged.new.add(name)


def _stage_rank(
    staged: Staged, opened: Opened, of: Live, prefix: str, size: int
) -> None:
    assert opened.manifest is not None
    known = opened.metadata.state_dict_metadata
    same = opened.manifest.world_size == size
    for name in known:
        if not name.startswith(f"{content.OF_LOWTIDE}."):
            continue
        kind, _, rest = name.split(".", 2)[2].partition(".")
        if kind == "waiting" and not same:
            raise CheckpointError(
                f"lowtide: load: {opened.where(name)}: expected the "
                f"{opened.manifest.world_size} ranks that saved gradients between two "
                f"reductions, got {size}. Load it on as many, or an older one."
            )
        if not name.startswith(prefix) or not same:
            continue
        staged.values[name] = _whole(known[name])
        if kind == "rng":
            staged.generators[rest] = name
        elif kind == "waiting":
            of_kind, _, key = rest.partition(".")
            _parameter(opened, of, name, key)
            staged.waiting.setdefault(of_kind, {})[key] = name


def _stage_objects_beside(staged: Staged, opened: Opened) -> None:
    """Of a checkpoint of torch's: what is neither the model nor the optimizer."""
    taken = set(staged.values)
    for name, known in opened.metadata.state_dict_metadata.items():
        beside = name not in taken and staged.placement.of_optimizer(name) is None
        if beside and isinstance(known, BytesStorageMetadata):
            staged.values[name] = None
            staged.extra[name] = name


def _split(
    rest: str, parameters: Mapping[str, nn.Parameter]
) -> tuple[str, tuple[str, ...]]:
    """A parameter's name, the longest there is, and a path in its state."""
    parts = rest.split(".")
    for k in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:k])) in parameters:
            return name, tuple(parts[k:])
    return rest.rpartition(".")[0], (parts[-1],)


def _parameter(opened: Opened, of: Live, name: str, key: str) -> nn.Parameter:
    if key not in of.parameters:
        raise CheckpointError(
            f"lowtide: load: {opened.where(name)}: expected a parameter of the model, "
            f"got '{key}'. Pass the model that was saved."
        )
    return of.parameters[key]


def _like(opened: Opened, name: str, tensor: Tensor) -> Tensor:
    """Empty, in host memory, this rank's part of what is saved as ``name``."""
    known = opened.metadata.state_dict_metadata[name]
    if not isinstance(known, TensorStorageMetadata):
        raise CheckpointError(
            f"lowtide: load: {opened.where(name)}: expected a tensor, got an object. "
            "Pass the model that was saved."
        )
    expected = f"{tensor.dtype} {list(tensor.shape)}"
    got = f"{known.properties.dtype} {list(known.size)}"
    if expected != got:
        raise CheckpointError(
            f"lowtide: load: {opened.where(name)}: expected {expected}, got {got}. "
            "Pass the model and optimizer that were saved."
        )
    mine: Tensor = rows_of(tensor).detach()
    if is_traceable_wrapper_subclass(mine):
        # Some write only part of themselves over others of their kind.
        here = made_of(mine, lambda part: part.to("cpu", copy=True))
    else:
        here = torch.empty_like(mine, device="cpu")
    if not isinstance(tensor, DTensor):
        return here
    return DTensor(here, tensor._spec, requires_grad=False)


def _new_state(known: TensorStorageMetadata, parameter: nn.Parameter) -> Tensor:
    """For an optimizer that has no state yet: what has a parameter's shape is sharded
    as it is."""
    dtype = known.properties.dtype
    sharded = isinstance(parameter, DTensor) and known.size == parameter.shape
    if not sharded or not known.size:
        return _whole(known)
    old = parameter._spec
    meta = TensorMeta(old.tensor_meta.shape, old.tensor_meta.stride, dtype)
    spec = DTensorSpec(old.mesh, old.placements, tensor_meta=meta)
    here = torch.empty_like(parameter._local_tensor, device="cpu", dtype=dtype)
    return DTensor(here, spec, requires_grad=False)


def _whole(known: Any) -> Any:
    if isinstance(known, TensorStorageMetadata):
        return torch.empty(known.size, dtype=known.properties.dtype)
    return None
