"""What programs read of FSDP2's private state, of lowtide's units: parameter groups,
sizes, streams. What has no counterpart raises ``AttributeError`` and names it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from lowtide._sharding.parameter import UnitParameter
    from lowtide.policies import DataParallelMeshDims


def refuse_private(who: str, what: str) -> NoReturn:
    raise AttributeError(
        f"lowtide: {who}: expected an attribute that it has here, too, got {what} of "
        "FSDP2's private state. Use the methods of FSDPModule, or ask hasattr before."
    )


class _Counterpart:
    """``_who``: what it is, in errors."""

    __slots__ = ("_who",)
    _who: str

    def __init__(self, who: str) -> None:
        object.__setattr__(self, "_who", who)

    if not TYPE_CHECKING:  # it would hide misspelt attributes

        def __getattr__(self, name: str) -> NoReturn:
            refuse_private(self._who, repr(name))

        def __setattr__(self, name: str, value: Any) -> None:
            if not isinstance(getattr(type(self), name, None), property):
                refuse_private(self._who, f"an assignment to {name!r}")
            object.__setattr__(self, name, value)


class StateContext(_Counterpart):
    """torch's pipeline schedules ask the post-backward of each of ``all_states``;
    lowtide's units are reduced by the root, which they call behind it."""

    __slots__ = ()
    all_states = ()


class CommContext(_Counterpart):
    """Streams for what programs do beside the gathers, one of a kind a device. No
    collective of lowtide's runs on them, and none is waited for through them: units
    wait for their own."""

    __slots__ = ("_device",)
    _device: torch.device

    def __init__(self, who: str, device: torch.device) -> None:
        super().__init__(who)
        object.__setattr__(self, "_device", device)

    @property
    def all_gather_stream(self) -> Any:
        return _stream(self._device, "all_gather")

    @property
    def all_gather_copy_in_stream(self) -> Any:
        return _stream(self._device, "all_gather_copy_in")

    @property
    def reduce_scatter_stream(self) -> Any:
        return _stream(self._device, "reduce_scatter")

    @property
    def all_reduce_stream(self) -> Any:
        return _stream(self._device, "all_reduce")


@functools.cache
def _stream(device: torch.device, kind: str) -> Any:
    handle = torch.get_device_module(device)
    where = {} if device.type == "cpu" else {"device": device}
    return handle.Stream(priority=0 if kind == "all_reduce" else -1, **where)


class ParameterGroup(_Counterpart):
    """Of one unit, made anew whenever it is asked for; equal if the unit is."""

    __slots__ = ("_state",)
    _state: PrivateState

    def __init__(self, state: PrivateState) -> None:
        super().__init__(f"FSDPParamGroup of unit '{state.name}'")
        object.__setattr__(self, "_state", state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParameterGroup) and other._state is self._state

    def __hash__(self) -> int:
        return hash(self._state)

    def _leave_pass(self, state: TrainingState) -> None:
        """Programs set IDLE after an error, so that FSDP2 reshards; lowtide's units
        reshard from any state."""
        if state != TrainingState.IDLE:
            refuse_private(self._who, f"_training_state = {state}")

    _training_state = property(fset=_leave_pass)  # reading it raises

    @property
    def fsdp_params(self) -> list[Parameter]:
        return [Parameter(self._state, each) for each in self._state.parameters]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self._state.modules

    @property
    def comm_ctx(self) -> CommContext:
        return self._state._comm_ctx

    @comm_ctx.setter
    def comm_ctx(self, context: CommContext) -> None:
        """torch's ``share_comm_ctx`` does that."""
        self._state._comm_ctx = context

    @property
    def mp_policy(self) -> Any:
        return self._state.policy

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        return _mesh_info(self._state)

    @property
    def post_forward_mesh_info(self) -> Any:
        """None: what forward has gathered stays until backward."""
        settings = self._state.settings
        if not settings.reshard_after_forward:
            return None
        return settings.post_forward_group or self.mesh_info

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        state = self._state
        state.auto_reshard = False
        state.settings.reshard_after_forward = info is not None
        smaller = None if isinstance(info, FSDPMeshInfo) else info
        state.settings.post_forward_group = smaller


class Parameter(_Counterpart):
    __slots__ = ("_parameter", "_state")
    _parameter: UnitParameter
    _state: PrivateState

    def __init__(self, state: PrivateState, parameter: UnitParameter) -> None:
        super().__init__(f"FSDPParam of {parameter.name}")
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "_parameter", parameter)

    @property
    def sharded_param(self) -> nn.Parameter:
        return self._parameter.shard

    @property
    def sharded_size(self) -> torch.Size:
        shard = self._parameter.shard
        assert isinstance(shard, DTensor)
        return shard._local_tensor.size()

    @property
    def orig_dtype(self) -> torch.dtype:
        return self._parameter.shard.dtype

    @property
    def fsdp_placement(self) -> Shard:
        return Shard(self._parameter.shard_dim)

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        return _mesh_info(self._state)

    @property
    def _orig_size(self) -> torch.Size:
        return torch.Size(self._parameter.sizes)

    @property
    def _param_fqn(self) -> str | None:
        return self._parameter.name if self._state.root is not None else None

    @property
    def _module_info(self) -> ParamModuleInfo:
        (module, name), *others = self._parameter.slots
        return ParamModuleInfo(
            module, name, [other for other, _ in others], [name for _, name in others]
        )


def _mesh_info(state: PrivateState) -> DataParallelMeshInfo:
    if state.storage is not None and not state.storage[1].shard_names:
        return DDPMeshInfo(state.mesh["replicas"], replicate_mesh_dim=0)
    if state.mesh.ndim == 1:
        return FSDPMeshInfo(state.mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(state.mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


class PrivateState:
    """Of a unit's state the part that answers for FSDP2's private one."""

    if TYPE_CHECKING:
        name: str
        device: torch.device
        mesh: DeviceMesh
        modules: tuple[nn.Module, ...]
        policy: MixedPrecisionPolicy
        storage: tuple[DeviceMesh, DataParallelMeshDims] | None
        settings: Any  # a _C.UnitSettings
        auto_reshard: bool
        parameters: list[UnitParameter]
        root: Any

        @property
        def together(self) -> Sequence[PrivateState]: ...

    else:  # a type checker would not find misspelt attributes

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(name)
            refuse_private(f"unit '{self.__dict__.get('name', '')}'", repr(name))

    @functools.cached_property
    def _state_ctx(self) -> StateContext:
        return StateContext(f"FSDPStateContext of unit '{self.name}'")

    @functools.cached_property
    def _comm_ctx(self) -> CommContext:
        return CommContext(f"FSDPCommContext of unit '{self.name}'", self.device)

    @property
    def _fsdp_param_group(self) -> ParameterGroup | None:
        if len(self.together) > 1:  # raises in FSDP2, too
            raise AssertionError(
                f"lowtide: unit '{self.name}': _fsdp_param_group: expected parameters "
                f"on one mesh, got a module with {len(self.together)}. Read "
                "_fsdp_param_groups."
            )
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _fsdp_param_groups(self) -> list[ParameterGroup]:  # from torch 2.12 on
        return [ParameterGroup(state) for state in self.together if state.parameters]

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self.policy

    def _root_post_backward_final_callback(self) -> None:
        """torch's pipeline schedules call it, whose backwards never reduce."""
        if self.root is not None:
            self.root.reduce_accumulated()
