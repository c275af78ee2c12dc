"""One ``fully_shard`` call: its modules, its parameters, its C++ unit."""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from lowtide import _C
from lowtide._state.embedding import EmbeddingRows, wants_rows
from lowtide._state.fused import FusedWeights
from lowtide._state.groups import groups_of, smaller_group
from lowtide._state.memory import device_memory
from lowtide._state.modules import ManagedParameter, check_shardable
from lowtide._state.parameter import (
    UnitParameter,
    local_gradient,
    make_shard,
    require_sharded,
)
from lowtide._state.ties import owner_of, remember_original, remember_shard
from lowtide.policies import (
    GradientMode,
    MixedPrecisionPolicy,
    ParameterDtypes,
    parameter_dtypes,
)

# Where a module keeps the state of its unit.
_STATE = "_lowtide_state"


class UnitState:
    """What ``fully_shard`` attaches to the modules of a unit.

    The C++ unit exists as soon as no parameter is on the meta device, and is made
    again when parameters are replaced by ones of another dtype.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        mesh: DeviceMesh,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
        grads: GradientMode = "exact",
    ) -> None:
        self.modules = modules
        self.mesh = mesh
        self.device = device
        self.policy = policy
        self.auto_reshard = reshard_after_forward is None
        self.name = ", ".join(type(module).__name__ for module in modules)
        self.parameters: list[UnitParameter] = []
        self.groups = groups_of(mesh, device)
        self.post_forward_group: _C.Collectives | None = None
        self.unit: _C.Unit | None = None
        self.root: _C.Root | None = None  # of the tree this unit is in
        self.embedding_rows: EmbeddingRows | None = None  # of a large nn.Embedding
        self.fused = FusedWeights() if grads == "fused" else None
        # Settings survive the C++ unit; applied by `_apply_settings`.
        self.settings: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward is not False,
            "reshard_after_backward": True,
            "gradient_sync": True,
            "encloses_units": False,
            "leaf_module": False,
            "unshard_in_backward": True,
            "all_reduce": True,
            "sum_only": False,
            "gradient_divide_factor": None,
        }
        self.reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.custom_all_gather: AllGather | None = None
        self.custom_reduce_scatter: ReduceScatter | None = None
        if not isinstance(reshard_after_forward, bool | None):
            self.post_forward_group = smaller_group(mesh, reshard_after_forward, device)
        self.hooks = _C.ForwardHooks(
            cast_inputs=policy.param_dtype if policy.cast_forward_inputs else None,
            cast_outputs=policy.output_dtype,
            # Bound weakly: the garbage collector does not see through C++.
            lazy_init=functools.partial(_lazy_init, weakref.ref(self)),
        )
        for module in modules:
            module.__dict__[_STATE] = self
            # So that torch.distributed.fsdp.fully_shard.state(module) finds it.
            states = module.__dict__.setdefault(STATE_KEY, {})
            states[torch_fully_shard.__wrapped__] = self

    # -- wrapping ---------------------------------------------------------------

    @torch.no_grad()
    def shard(
        self,
        managed: list[ManagedParameter],
        place: Callable[[nn.Parameter], Shard | None] | None = None,
    ) -> None:
        """Replaces every parameter by its shard. Frees each full one in turn."""
        for item in managed:
            if (owner := owner_of(item.parameter)) is not None:
                owner.tie(item.slots)
                continue
            check_shardable(item)
            module, name = item.slots[0]
            original = item.parameter
            who = f"{type(module).__name__}.{name}"
            parameter_dtypes(  # raises
                original.dtype, self.policy, who=who, trainable=original.requires_grad
            )
            placement = place(original) if place is not None else None
            parameter = UnitParameter(
                item.slots,
                name=who,
                **make_shard(original, self.mesh, placement, who),
            )
            parameter.register(parameter.shard)
            remember_original(original, parameter)
            remember_shard(parameter)
            self.parameters.append(parameter)
        self.refresh()
        self.choose_fused()
        self._watch_state_dicts(self.parameters)

    def _watch_state_dicts(self, parameters: list[UnitParameter]) -> None:
        for module in {slot[0] for p in parameters for slot in p.slots}:
            module.register_state_dict_pre_hook(self._show_shards)
            module._register_load_state_dict_pre_hook(self._show_shards)
            module.register_load_state_dict_post_hook(self._after_load)

    # -- tied parameters (see ties.py) ------------------------------------------

    def give_up(self, parameter: UnitParameter) -> None:
        self.parameters.remove(parameter)
        self._forget_unit()

    def take(self, parameter: UnitParameter) -> None:
        self.parameters.append(parameter)
        self._forget_unit()
        self._watch_state_dicts([parameter])

    def _forget_unit(self) -> None:
        """The next `refresh` makes another, with the parameters there are then."""
        if self.unit is not None:
            self.unit.reshard()
        self.unit = None

    # -- the C++ unit -----------------------------------------------------------

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over parameters that were replaced (``to_empty``, ``.to(dtype)``,
        ``load_state_dict(assign=True)``, ...): their values move into the unit's
        flat buffer. Does nothing while any is on the meta device."""
        for parameter in self.parameters:
            registered = parameter.registered
            owner = owner_of(registered)
            if owner is not None and owner is not parameter:
                self._require_tied_in_time(parameter, owner)
            elif registered is not parameter.full:
                require_sharded(registered, parameter)
                parameter.shard = registered
                remember_shard(parameter)
        if any(local_of(p.shard).is_meta for p in self.parameters):
            return
        if self.unit is None or not self._dtypes_fit():
            self._make_unit()
        assert self.unit is not None
        moved = False
        for i, parameter in enumerate(self.parameters):
            local, own = local_of(parameter.shard), self.unit.local_shard(i)
            if local.data_ptr() != own.data_ptr() or parameter.full is None:
                own.copy_(local)
                parameter.shard._local_tensor = own
                moved = True
            if parameter.full is None:
                parameter.make_full(self.unit.full(i))
                if self.fused is not None:
                    self.fused.made_full(parameter)
        if moved or not self.unit.attached:
            self.attach()

    def _require_tied_in_time(
        self, parameter: UnitParameter, owner: UnitParameter
    ) -> None:
        if self.root is not None:
            raise ValueError(
                f"lowtide: {parameter.name}: expected weights to be tied before the "
                f"first forward, got one that has been tied to {owner.name} since. "
                "Tie it when the model is built."
            )

    def _dtypes_fit(self) -> bool:
        return all(
            parameter.spec.tensor_meta is not None
            and parameter.spec.tensor_meta.dtype == parameter.shard.dtype
            for parameter in self.parameters
        )

    def _make_unit(self) -> None:
        infos = []
        for parameter in self.parameters:
            shard = parameter.shard
            parameter.spec = shard._spec
            parameter.full = None
            dtypes = self.dtypes(parameter)
            infos.append(
                _C.ParameterInfo(
                    name=parameter.name,
                    sizes=list(parameter.sizes),
                    storage_dtype=dtypes.storage,
                    compute_dtype=dtypes.compute,
                    reduce_dtype=dtypes.reduce,
                    shard_dim=parameter.shard_dim,
                )
            )
        self.unit = _C.Unit(
            name=self.name,
            infos=infos,
            gather_group=self.groups.gather,
            reduce_group=self.groups.reduce,
            memory=device_memory(self.device),
        )
        self.embedding_rows = None
        if self.fused is not None:
            self.fused.use(self.unit)
        self.hooks.set_unit(self.unit)
        self._apply_settings()

    def dtypes(self, parameter: UnitParameter) -> ParameterDtypes:
        shard = parameter.shard
        return parameter_dtypes(
            shard.dtype,
            self.policy,
            who=parameter.name,
            trainable=shard.requires_grad,
        )

    def attach(self) -> None:
        """Hands the Python objects to the C++ unit, which then swaps them in and
        out of ``module._parameters``. Nothing that leads to a module may go there:
        the collector does not see a cycle through C++."""
        assert self.unit is not None
        self.unit.attach(
            slots=[
                (module._parameters, name, index)
                for index, parameter in enumerate(self.parameters)
                for module, name in parameter.slots
            ],
            shards=[parameter.shard for parameter in self.parameters],
            full=[parameter.full for parameter in self.parameters],
            wrap=functools.partial(
                _wrap_gradients, [parameter.spec for parameter in self.parameters]
            ),
            unwrap=functools.partial(
                local_gradient, [parameter.parallel for parameter in self.parameters]
            ),
        )

    def detach(self) -> None:
        """Drops the C++ unit's references, so that ``nn.Module._apply`` may swap
        the tensors inside the parameters."""
        if self.unit is not None:
            self.unit.detach()

    # -- settings ---------------------------------------------------------------

    def set(self, name: str, value: Any) -> None:
        assert name in self.settings, name
        self.settings[name] = value
        if self.unit is not None:
            setattr(self.unit, name, value)

    def _apply_settings(self) -> None:
        unit = self.unit
        assert unit is not None
        for name, value in self.settings.items():
            setattr(unit, name, value)
        unit.replica_group = self.groups.replicas
        unit.post_forward_group = self.post_forward_group
        unit.set_reduce_hook(self.reduce_hook)
        gather, reduce = self.groups.gather, self.groups.reduce
        if self.custom_all_gather is not None:
            gather = gather.with_custom(
                group=self.groups.gather_process_group,
                all_gather=self.custom_all_gather,
                reduce_scatter=None,
            )
        if self.custom_reduce_scatter is not None:
            reduce = reduce.with_custom(
                group=self.groups.reduce_process_group,
                all_gather=None,
                reduce_scatter=self.custom_reduce_scatter,
            )
        unit.use_groups(gather, reduce)

    def settings_changed(self) -> None:
        """After one of the attributes that are not in ``settings``."""
        if self.unit is not None:
            self._apply_settings()

    def choose_rows(self) -> None:
        """Lets a large embedding and its gradient come in blocks of rows."""
        module = self.modules[0]
        alone = len(self.modules) == len(self.parameters) == 1
        rows = alone and self.parameters[0].may_stream_rows
        if rows and wants_rows(module, original_class(module)):
            unit, weight = self.materialized(), self.parameters[0].full
            assert weight is not None
            sums_in = self.dtypes(self.parameters[0]).reduce
            fused = self.fused is not None and sums_in == torch.float32
            self.embedding_rows = EmbeddingRows(unit, weight, fused=fused)

    def choose_fused(self) -> None:
        """Finds the weights whose gradients are summed in place."""
        if self.fused is not None:
            dtypes = [self.dtypes(parameter) for parameter in self.parameters]
            self.fused.choose(self.parameters, dtypes, self.device)

    def fuses(self, parameter: UnitParameter) -> bool:
        return self.fused is not None and self.fused.fuses(parameter)

    # -- hooks ------------------------------------------------------------------

    # What torch.distributed.fsdp.register_fsdp_forward_method calls.
    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        changed = self.hooks.pre(module, args, kwargs)
        return (args, kwargs) if changed is None else changed

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        changed = self.hooks.post(module, args, output)
        return output if changed is None else changed

    # What torch's pipeline schedules call: their backwards never reduce, afterwards
    # they ask every unit to, and then the root.
    _state_ctx = types.SimpleNamespace(all_states=())
    _fsdp_param_group = None
    _comm_ctx: Any = None

    def _root_post_backward_final_callback(self) -> None:
        if self.root is not None:
            self.root.reduce_accumulated()

    def materialized(self) -> _C.Unit:
        """The C++ unit; raises while a parameter is on the meta device."""
        self.refresh()
        if self.unit is None:
            names = [p.name for p in self.parameters if local_of(p.shard).is_meta]
            raise RuntimeError(
                f"lowtide: unit '{self.name}': expected parameters with storage, got "
                f"meta tensors: {', '.join(names)}. Call "
                f"model.to_empty(device='{self.device.type}') and initialise them, or "
                "load a checkpoint with assign=True."
            )
        return self.unit

    def _show_shards(self, *args: Any, **kwargs: Any) -> None:
        if self.unit is not None:
            self.unit.reshard()

    def _after_load(self, *args: Any, **kwargs: Any) -> None:
        self.refresh()


def local_of(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor


def original_class(module: nn.Module) -> type:
    """Of a module that ``fully_shard`` has made an ``FSDPModule``."""
    original: type = type(module)._original_class
    return original


def unit_state(module: nn.Module) -> UnitState | None:
    """The state of the unit that ``module`` was passed to ``fully_shard`` for."""
    state: UnitState | None = module.__dict__.get(_STATE)
    return state


def _lazy_init(state: "weakref.ref[UnitState]") -> None:
    from lowtide._state.root import build_root

    alive = state()
    assert alive is not None
    if "torch._dynamo" in sys.modules:  # the root's own forward may be compiled
        torch.compiler.disable(build_root)(alive)
    else:
        build_root(alive)


def _wrap_gradients(
    specs: list[DTensorSpec], indices: list[int], locals_: list[torch.Tensor]
) -> list[torch.Tensor]:
    # Without DTensor.__init__, which does nothing at five times the price.
    return [
        DTensor.__new__(DTensor, local, specs[i], requires_grad=False)
        for i, local in zip(indices, locals_, strict=True)
    ]
