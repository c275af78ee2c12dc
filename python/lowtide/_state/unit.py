"""One ``fully_shard`` call: its modules, its parameters, its C++ unit."""

import dataclasses
import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lowtide import _C
from lowtide._state.embedding import EmbeddingRows, wants_rows
from lowtide._state.groups import gather_and_reduce
from lowtide._state.memory import device_memory
from lowtide._state.modules import ManagedParameter, remember_original
from lowtide.policies import MixedPrecisionPolicy, ParameterDtypes, parameter_dtypes


@dataclasses.dataclass
class UnitParameter:
    """A parameter of the unit in its two forms."""

    slots: list[tuple[nn.Module, str]]
    spec: DTensorSpec
    shard: nn.Parameter  # a DTensor, registered between steps
    name: str  # "Linear.weight", the fully qualified name once there is a root
    full: nn.Parameter | None = None  # registered while the unit is unsharded

    @property
    def registered(self) -> nn.Parameter:
        module, name = self.slots[0]
        parameter = module._parameters[name]
        assert parameter is not None
        return parameter

    def register(self, parameter: nn.Parameter) -> None:
        for module, name in self.slots:
            module._parameters[name] = parameter


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
        reshard_after_forward: bool | None,
    ) -> None:
        self.modules = modules
        self.mesh = mesh
        self.device = device
        self.policy = policy
        self.auto_reshard = reshard_after_forward is None
        self.name = ", ".join(type(module).__name__ for module in modules)
        self.parameters: list[UnitParameter] = []
        self.gather_group, self.reduce_group = gather_and_reduce(mesh, device)
        self.unit: _C.Unit | None = None
        self.root: _C.Root | None = None  # of the tree this unit is in
        self.embedding_rows: EmbeddingRows | None = None  # of a large nn.Embedding
        # Settings survive the C++ unit; applied by `_apply_settings`.
        self.settings: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward is not False,
            "reshard_after_backward": True,
            "gradient_sync": True,
            "encloses_units": False,
            "leaf_module": False,
        }
        self.hooks = _C.ForwardHooks(
            cast_inputs=policy.param_dtype if policy.cast_forward_inputs else None,
            cast_outputs=policy.output_dtype,
            # Bound weakly: the garbage collector does not see through C++.
            lazy_init=functools.partial(_lazy_init, weakref.ref(self)),
        )
        for module in modules:
            module.__dict__[_STATE] = self

    # -- wrapping ---------------------------------------------------------------

    @torch.no_grad()
    def shard(self, managed: list[ManagedParameter]) -> None:
        """Replaces every parameter by its shard. Frees each full one in turn."""
        for item in managed:
            module, name = item.slots[0]
            original = item.parameter
            who = f"{type(module).__name__}.{name}"
            parameter_dtypes(original.dtype, self.policy, who=who)  # raises
            rows = original.chunk(self.gather_group.size)
            rank = self.gather_group.rank
            local = (
                rows[rank].clone()
                if rank < len(rows)
                else original.new_empty((0, *original.shape[1:]))
            )
            spec = DTensorSpec(
                self.mesh,
                (Shard(0),),
                tensor_meta=TensorMeta(
                    original.shape, original.stride(), original.dtype
                ),
            )
            shard = nn.Parameter(
                DTensor(local, spec, requires_grad=False),
                requires_grad=original.requires_grad,
            )
            parameter = UnitParameter(item.slots, spec, shard, who)
            parameter.register(shard)
            remember_original(original, who)
            self.parameters.append(parameter)
        self.refresh()
        for module in {slot[0] for p in self.parameters for slot in p.slots}:
            module.register_state_dict_pre_hook(self._show_shards)
            module._register_load_state_dict_pre_hook(self._show_shards)
            module.register_load_state_dict_post_hook(self._after_load)

    # -- the C++ unit -----------------------------------------------------------

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over parameters that were replaced (``to_empty``, ``.to(dtype)``,
        ``load_state_dict(assign=True)``, ...): their values move into the unit's
        flat buffer. Does nothing while any is on the meta device."""
        for parameter in self.parameters:
            registered = parameter.registered
            if registered is not parameter.full:
                parameter.shard = registered
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
                parameter.full = nn.Parameter(
                    self.unit.full(i), requires_grad=parameter.shard.requires_grad
                )
        if moved or not self.unit.attached:
            self.attach()

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
                    sizes=list(shard.shape),
                    storage_dtype=dtypes.storage,
                    compute_dtype=dtypes.compute,
                    reduce_dtype=dtypes.reduce,
                )
            )
        self.unit = _C.Unit(
            name=self.name,
            infos=infos,
            gather_group=self.gather_group,
            reduce_group=self.reduce_group,
            memory=device_memory(self.device),
        )
        self.embedding_rows = None
        self.hooks.set_unit(self.unit)
        self._apply_settings()

    def dtypes(self, parameter: UnitParameter) -> ParameterDtypes:
        return parameter_dtypes(parameter.shard.dtype, self.policy, who=parameter.name)

    def attach(self) -> None:
        """Hands the Python objects to the C++ unit, which then swaps them in and
        out of ``module._parameters``."""
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
        for name, value in self.settings.items():
            setattr(self.unit, name, value)

    def choose_rows(self) -> None:
        """Lets a large embedding and its gradient come in blocks of rows."""
        module = self.modules[0]
        alone = len(self.modules) == len(self.parameters) == 1
        if alone and wants_rows(module, original_class(module)):
            unit, weight = self.materialized(), self.parameters[0].full
            assert weight is not None
            self.embedding_rows = EmbeddingRows(unit, weight)

    # -- hooks ------------------------------------------------------------------

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
    mro = type(module).__mro__
    original: type = mro[type(module)._orig_cls_mro_index]  # type: ignore[attr-defined]
    return original


def unit_state(module: nn.Module) -> UnitState | None:
    """The state of the unit that ``module`` was passed to ``fully_shard`` for."""
    state: UnitState | None = module.__dict__.get(_STATE)
    return state


def _lazy_init(state: "weakref.ref[UnitState]") -> None:
    from lowtide._state.root import build_root

    alive = state()
    assert alive is not None
    build_root(alive)


def _wrap_gradients(
    specs: list[DTensorSpec], indices: list[int], locals_: list[torch.Tensor]
) -> list[torch.Tensor]:
    # Without DTensor.__init__, which does nothing at five times the price.
    return [
        DTensor.__new__(DTensor, local, specs[i], requires_grad=False)
        for i, local in zip(indices, locals_, strict=True)
    ]
