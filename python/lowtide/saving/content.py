"""What is in a checkpoint: the names, as DCP's files have them, and the tensors.

model.*                  `state_dict()`, as FSDP2's scripts save it
optimizer.*              by parameters' names, as torch's `get_state_dict` gives it
gradients.*              `.grad` of parameters that have one
extra.*                  what the caller adds
lowtide.rank_R.rng.*     generators of rank R
lowtide.rank_R.waiting.* what rank R accumulated without a reduction
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _get_fqns, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lowtide._sharding import stepped
from lowtide._sharding.local_parameter import rows_of
from lowtide._sharding.parameter import UnitParameter
from lowtide._sharding.unit import UnitState, units_of
from lowtide.optimizing import sharded_optimizer

MODEL, OPTIMIZER, GRADIENTS, EXTRA = "model", "optimizer", "gradients", "extra"
OF_LOWTIDE = "lowtide"
KINDS = ("unreduced", "partial")  # of what waits, as a unit gives it

Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclasses.dataclass(frozen=True)
class Live:
    """A model and its optimizers while a checkpoint is saved or loaded: parameters are
    the shards, optimizers speak of them. Tensors are the model's own."""

    model: nn.Module
    optimizers: list[Optimizer]
    state: dict[str, Any]  # the model's, by name
    parameters: dict[str, nn.Parameter]

    @property
    def device(self) -> torch.device:
        """That the model computes on; offloaded shards are not there."""
        for state in units_of(self.model.modules()):
            return state.device
        tensors = [*self.parameters.values(), *self.state.values()]
        devices = (rows_of(t).device for t in tensors if isinstance(t, Tensor))
        return next(devices, torch.device("cpu"))

    def names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.parameters.items()}

    def units(self) -> Iterator[tuple[UnitState, int, UnitParameter, str]]:
        """Every sharded parameter: its unit, number and name."""
        names = self.names()
        for state in units_of(self.model.modules()):
            for i, parameter in enumerate(state.parameters):
                if id(parameter.shard) in names:
                    yield state, i, parameter, names[id(parameter.shard)]


@contextlib.contextmanager
def live(model: nn.Module, optimizer: Optimizers) -> Iterator[Live]:
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or ()
    with contextlib.ExitStack() as stack, torch.no_grad():
        for one in optimizers:
            stack.enter_context(sharded_optimizer(one))
        state = get_model_state_dict(model)  # parameters are the shards afterwards
        parameters = {
            sorted(_get_fqns(model, name))[0]: parameter
            for name, parameter in model.named_parameters()
        }
        yield Live(model, list(optimizers), state, parameters)


def collect(of: Live, extra: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The state dict that is saved. Raises ValueError for what could not be loaded."""
    mine: dict[str, Any] = {"rng": generators(of.device)}
    if waiting := _waiting(of):
        mine["waiting"] = waiting
    content = {
        MODEL: of.state,
        EXTRA: dict(extra),
        OF_LOWTIDE: {f"rank_{rank}": mine},
    }
    gradients = {n: p.grad for n, p in of.parameters.items() if p.grad is not None}
    if gradients:
        content[GRADIENTS] = gradients
    if of.optimizers:
        content[OPTIMIZER] = _optimizer_state(of)
    _require_plain(extra)
    return content


def generators(device: torch.device) -> dict[str, Tensor]:
    """States of this rank's random numbers, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    for kind, state in states.items():
        if kind == "cpu":
            torch.set_rng_state(state)
        elif kind == device.type:
            torch.get_device_module(device).set_rng_state(state, device)


def layout(parameter: UnitParameter) -> str:
    """Over which ranks its gradients are summed, in which parts."""
    spec = parameter.spec
    return f"{tuple(spec.mesh.shape)} {spec.placements}"


def _waiting(of: Live) -> dict[str, Any]:
    """Gradients that a unit keeps until they are reduced, over its shards or its
    replicas, and how they are laid out."""
    found: dict[str, Any] = {}
    for state, i, parameter, name in of.units():
        if state.unit is None:
            continue
        if parameter.full is not None and parameter.full.grad is not None:
            raise NotImplementedError(
                f"lowtide: save: {name}: expected gradients where backward leaves "
                "them, got one that a pipeline's schedule has written to the full "
                "parameter. Save between steps."
            )
        accumulating, *tensors = state.unit.waiting_gradient(i)
        if accumulating or any(tensor is not None for tensor in tensors):
            found.setdefault("layout", {})[name] = layout(parameter)
            found.setdefault("accumulating", {})[name] = accumulating
        for kind, tensor in zip(KINDS, tensors, strict=True):
            if tensor is not None:
                found.setdefault(kind, {})[name] = tensor
    return found


def _optimizer_state(of: Live) -> dict[str, Any]:
    names = of.names()
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in of.optimizers:
        stepped.require_whole(optimizer, "save")
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in names:
                    raise ValueError(
                        f"lowtide: save: {type(optimizer).__name__}: expected the "
                        "model's parameters, got another one of shape "
                        f"{tuple(p.shape)}. Pass the model that contains it, or make "
                        "the optimizer again of model.parameters()."
                    )
                if values := optimizer.state.get(p):
                    state[names[id(p)]] = dict(values)
            saved = {key: value for key, value in group.items() if key != "params"}
            groups.append({**saved, "params": [names[id(p)] for p in group["params"]]})
    return {"state": state, "param_groups": groups}


def _require_plain(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if not isinstance(name, str):
            raise ValueError(
                f"lowtide: save: extra: expected names, got {name!r}. Use strings for "
                "keys."
            )
        if isinstance(value, DTensor | nn.Module | Optimizer):
            raise ValueError(
                f"lowtide: save: extra: expected '{name}' to be a plain value, got a "
                f"{type(value).__name__}. Sharded tensors belong to the model: pass "
                "an nn.ModuleDict with both."
            )
