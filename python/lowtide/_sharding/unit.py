"""The parameters of one ``fully_shard`` call that are split over one mesh: their
modules and their C++ unit. A call makes such a unit for each of its meshes."""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed._composable.contract import (
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from lowtide import _C
from lowtide._base.classes import class_name, original_class
from lowtide._base.memory import device_memory, host_memory
from lowtide._sharding.conversions import watch_conversions
from lowtide._sharding.embedding import EmbeddingRows, wants_rows
from lowtide._sharding.extension import Extensions
from lowtide._sharding.forward_hooks import hooks_of
from lowtide._sharding.fused import FusedWeights
from lowtide._sharding.groups import groups_of, smaller_group
from lowtide._sharding.modules import UNIT_STATE, ManagedParameter, check_shardable
from lowtide._sharding.owners import (
    owner_of,
    remember_original,
    remember_replaced,
    remember_shard,
)
from lowtide._sharding.parameter import (
    UnitParameter,
    local_gradient,
    make_shard,
    require_sharded,
)
from lowtide._sharding.private_state import PrivateState
from lowtide._sharding.subclass import extended_class, require_hooks
from lowtide._torch_version import (
    CASTS_EACH_OF_A_LIST,
    OWN,
    chosen_grad_dtype,
    without_dtype_override,
)
from lowtide.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    GradientMode,
    OffloadPolicy,
    ParameterDtypes,
    overridden_dtype,
    parameter_dtypes,
    reduced_together,
)

_numbers = itertools.count(1)  # of gathers without a root
alive: "weakref.WeakSet[UnitState]" = weakref.WeakSet()


class UnitState(PrivateState):
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
        grads: GradientMode,
        offload_policy: OffloadPolicy | None,
        before_forward: "Callable[[UnitState], None]",
        first: "UnitState | None" = None,
    ) -> None:
        """``first``: the unit of the same call that is entered first, for the others;
        it casts what goes in and out."""
        self.modules = modules
        self._first = weakref.ref(first) if first is not None else None
        self.beside: list[UnitState] = []  # the call's other units, of the first
        self.mesh = mesh
        self.device = device
        # Where shards and reduced gradients are.
        self.home = device
        self.policy = without_dtype_override(policy)
        self._overridden_dtype = functools.partial(overridden_dtype, policy=policy)
        self.auto_reshard = reshard_after_forward is None
        self.over = f" over {_text_of(mesh)}" if first is not None else ""
        self.name = ", ".join(map(class_name, modules)) + self.over
        # The mesh that its parameters are on already, and which dimensions are shards'.
        self.storage: tuple[DeviceMesh, DataParallelMeshDims] | None = None
        self.ignored: set[int] = set()  # ids of parameters that stay the user's
        # The advice where its parameters are read and its modules not called.
        self.instead = "shard the module that reads it and not this one"
        self.chosen_by_wrap = False
        self.explains_errors = False  # as the root, once there was one
        # Gradients that wait for the end of a conversion; None without one.
        self._unconverted: list[tuple[UnitParameter, Any]] | None = None
        self.parameters: list[UnitParameter] = []
        self.groups = groups_of(mesh, device)
        self.unit: _C.Unit | None = None
        # Called with this when its gradients have been reduced.
        self.gradient_takers: list[Callable[[UnitState], None]] = []
        self.root: _C.Root | None = None  # of the tree this unit is in
        self.tree: list[weakref.ref[UnitState]] = []  # its units
        # The number of the last gather that no root has noted; its ranks have not
        # compared it.
        self.gathered_alone = 0
        self.embedding_rows: EmbeddingRows | None = None  # of a large nn.Embedding
        self.extensions: Extensions | None = None  # of tensor subclasses
        self.fused = FusedWeights() if grads == "fused" else None
        # The C++ unit's, whichever it is.
        self.settings = _C.UnitSettings()
        self.settings.reshard_after_forward = reshard_after_forward is not False
        self.settings.reduction.replicas = self.groups.replicas
        if isinstance(offload_policy, CPUOffloadPolicy):
            self.home = torch.device("cpu")
            self.settings.host = host_memory(device, offload_policy.pin_memory)
        self.custom_all_gather: AllGather | None = None
        self.custom_reduce_scatter: ReduceScatter | None = None
        # States whose units to gather ahead; the units may not exist yet.
        self.forward_prefetch: list[UnitState] = []
        self.backward_prefetch: list[UnitState] = []
        if not isinstance(reshard_after_forward, bool | None):
            self.settings.post_forward_group = smaller_group(
                mesh, reshard_after_forward, device
            )
        casts_inputs = first is None and policy.cast_forward_inputs
        self.hooks = _C.ForwardHooks(
            cast_inputs=policy.param_dtype if casts_inputs else None,
            cast_outputs=policy.output_dtype if first is None else None,
            cast_each=CASTS_EACH_OF_A_LIST,
            # Bound weakly: the garbage collector does not see through C++.
            lazy_init=functools.partial(_with_alive, weakref.ref(self), before_forward),
            modules=modules,
        )
        self.enter, self.leave = hooks_of(self)  # that its modules have
        alive.add(self)
        if first is not None:
            first.beside.append(self)
            return
        for module in modules:
            module.__dict__[UNIT_STATE] = self
            # So that torch.distributed.fsdp.fully_shard.state(module) finds it.
            states = module.__dict__.setdefault(STATE_KEY, {})
            states[torch_fully_shard.__wrapped__] = self
            # So that torch's replicate() leaves its parameters alone.
            registry = module.__dict__.setdefault(REGISTRY_KEY, {})
            registry[torch_fully_shard.__name__] = RegistryItem()

    @property
    def first(self) -> "UnitState":
        first = self if self._first is None else self._first()
        assert first is not None
        return first

    @property
    def is_first(self) -> bool:
        return self._first is None

    @property
    def together(self) -> "list[UnitState]":
        """The units of its call, in the order in which they are entered."""
        return [self.first, *self.first.beside]

    # -- wrapping ---------------------------------------------------------------

    @torch.no_grad()
    def shard(self, managed: list[ManagedParameter]) -> None:
        """Replaces every parameter by its shard. Frees each full one in turn."""
        for item in managed:
            if (owner := owner_of(item.parameter)) is not None:
                owner.tie(item.slots)
                for unit in [unit for unit in alive if owner in unit.parameters]:
                    unit._watch_modules(item.slots)
                continue
            check_shardable(item)
            module, name = item.slots[0]
            original = item.parameter
            who = f"{class_name(module)}.{name}"
            compute = self._overridden_dtype(original, who=who)
            parameter_dtypes(  # raises
                original.dtype,
                self.policy_of(compute),
                who=who,
                grad_dtype=chosen_grad_dtype(original),
                trainable=original.requires_grad,
            )
            parameter = UnitParameter(
                item.slots,
                name=who,
                compute_dtype=compute,
                **make_shard(
                    original, self.mesh, item.placement, who, self.home, self.storage
                ),
            )
            parameter.register(parameter.shard)
            remember_original(original, parameter)
            remember_shard(parameter)
            self.parameters.append(parameter)
        self.refresh()
        self.choose_fused()
        self._watch_modules([slot for p in self.parameters for slot in p.slots])

    def _watch_modules(self, slots: list[tuple[nn.Module, str]]) -> None:
        modules = {module for module, _ in slots}
        watch_conversions(modules, self)
        for module in modules:
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
        self._watch_modules(parameter.slots)

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
        flat buffer, and what waits for a reduction of their gradients is dropped, as
        `.grad` goes with a parameter. Does nothing while any is on the meta device, and
        keeps nothing on its own while any is on another (``model.to("cpu")``)."""
        moved = False
        for i, parameter in enumerate(self.parameters):
            registered = parameter.registered
            owner = owner_of(registered)
            if owner is not None and owner is not parameter:
                self._require_tied_in_time(parameter, owner)
            elif registered is not parameter.full:
                require_sharded(registered, parameter)
                if registered is not parameter.shard:
                    moved = True
                    remember_replaced(parameter.shard, parameter)
                    if self.unit is not None:
                        self.unit.drop_waiting_gradient(i)
                parameter.follow_grad_dtype(registered)
                parameter.shard = registered
                remember_shard(parameter)
        if any(local_of(p.shard).is_meta for p in self.parameters):
            return
        if self.is_away:
            self._leave_device()
            return
        if self.unit is None or not self._layout_fits():
            self._make_unit()
        assert self.unit is not None
        for i, parameter in enumerate(self.parameters):
            if not parameter.extended:
                local, own = local_of(parameter.shard), self.unit.local_shard(i)
                if local.data_ptr() != own.data_ptr() or parameter.full is None:
                    own.copy_(local)
                    parameter.shard._local_tensor = own
                    moved = True
            if parameter.full is None:
                moved = True
                parameter.make_full(self.unit.full(i))
                if self.fused is not None:
                    self.fused.made_full(parameter)
        if moved or not self.unit.attached:
            self.attach()

    @property
    def is_away(self) -> bool:
        """Parameters have left the device, as with ``model.to("cpu")``."""
        return any(self._is_elsewhere(p) for p in self.parameters) and not any(
            local_of(p.shard).is_meta for p in self.parameters
        )

    def _is_elsewhere(self, parameter: UnitParameter) -> bool:
        device = local_of(parameter.shard).device
        return device.type != self.home.type or (
            device.type != "cpu" and device != self.home
        )

    def _leave_device(self) -> None:
        """The parameters wait elsewhere, with the values and the bytes they have there;
        when they are back, `refresh` makes another unit."""
        if self.unit is None:
            return
        self._leave_root()
        self._forget_unit()
        self.hooks.set_unit(None)
        if self.fused is not None:
            self.fused.leave()
        self.settings.prefetch(forward=[], backward=[])
        self.embedding_rows = self.extensions = None
        for parameter in self.parameters:
            parameter.full = None

    def _require_tied_in_time(
        self, parameter: UnitParameter, owner: UnitParameter
    ) -> None:
        if self.root is not None:
            raise ValueError(
                f"lowtide: {parameter.name}: expected weights to be tied before the "
                f"first forward, got one that has been tied to {owner.name} since. "
                "Tie it when the model is built."
            )

    def _layout_fits(self) -> bool:
        return all(
            parameter.spec.tensor_meta is not None
            and parameter.spec.tensor_meta.dtype == parameter.shard.dtype
            and parameter.gradient_dtype == self.dtypes(parameter).gradient
            and parameter.extended_class is extended_class(local_of(parameter.shard))
            for parameter in self.parameters
        )

    def _make_unit(self) -> None:
        self._leave_root()
        infos = []
        for parameter in self.parameters:
            shard = parameter.shard
            parameter.spec = shard._spec
            parameter.full = None
            parameter.extended_class = extended_class(local_of(shard))
            dtypes = self.dtypes(parameter)
            parameter.take_dtypes(dtypes)
            infos.append(
                _C.ParameterInfo(
                    name=parameter.name,
                    sizes=list(parameter.sizes),
                    storage_dtype=dtypes.storage,
                    compute_dtype=dtypes.compute,
                    reduce_dtype=dtypes.reduce,
                    shard_dim=parameter.shard_dim,
                    extended=parameter.extended,
                    gradient_as_computed=parameter.gradient_as_computed(dtypes.compute),
                    gradient_dtype=dtypes.gradient,
                    arriving_dtype=dtypes.arriving,
                    summed_before=bool(parameter.parallel and parameter.annotations),
                )
            )
        extended = [p for p in self.parameters if p.extended]
        self.extensions = (
            Extensions(
                extended,
                [self.dtypes(parameter).compute for parameter in extended],
                self.mesh,
                [self.policy_of(parameter.compute_dtype) for parameter in extended],
                keeps_parts=self.settings.post_forward_group is not None,
                device=self.device,
            )
            if extended
            else None
        )
        self.unit = _C.Unit(
            name=self.name,
            infos=infos,
            gather_group=self.groups.gather,
            reduce_group=self.groups.reduce,
            memory=device_memory(self.device),
            settings=self.settings,
            modules=len(self.modules),
            host_channel=self.groups.host,
        )
        self.embedding_rows = None
        if self.fused is not None:
            self.fused.use(self.unit)
        self.hooks.set_unit(self.unit)
        self.use_groups()

    def _leave_root(self) -> None:
        """Another unit takes this one's place: the next forward makes another root."""
        if self.unit is not None and self.unit.accumulating:
            raise RuntimeError(
                f"lowtide: unit '{self.name}': expected parameters to keep dtype, "
                "class and device while gradients accumulate without sync, got others. "
                "Convert after a backward that reduces, or after zero_grad()."
            )
        for reference in self.tree:
            if (state := reference()) is not None:
                state.root = None
                state.hooks.look_again()
        self.tree = []

    def policy_of(self, compute: torch.dtype | None) -> MixedPrecisionPolicy:
        """Of a parameter that is computed with in ``compute``, if that is its own."""
        if compute is None:
            return self.policy
        return dataclasses.replace(self.policy, param_dtype=compute)

    def dtypes(self, parameter: UnitParameter) -> ParameterDtypes:
        own = self._dtypes_alone(parameter)
        chosen = any(p.grad_dtype != OWN for p in self.parameters)
        if not chosen or self.policy.reduce_dtype is not None:
            return own
        trainable = [p for p in self.parameters if p.shard.requires_grad]
        return reduced_together(own, map(self._dtypes_alone, trainable))

    def _dtypes_alone(self, parameter: UnitParameter) -> ParameterDtypes:
        shard = parameter.shard
        return parameter_dtypes(
            shard.dtype,
            self.policy_of(parameter.compute_dtype),
            who=parameter.name,
            grad_dtype=parameter.grad_dtype,
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
                _wrap_gradients, [each.gradient_spec for each in self.parameters]
            ),
            unwrap=functools.partial(
                local_gradient,
                [parameter.parallel for parameter in self.parameters],
                [parameter.data_parallel for parameter in self.parameters],
                [parameter.annotations for parameter in self.parameters],
            ),
            refuse=functools.partial(_refuse_replaced, weakref.ref(self)),
            extension=self.extensions.calls if self.extensions is not None else None,
        )

    # -- conversions (see conversions.py) ----------------------------------------

    @property
    def is_converted(self) -> bool:
        return self._unconverted is not None

    @property
    def is_gathered(self) -> bool:
        return self.unit is not None and self.unit.state == "unsharded"

    def begin_conversion(self) -> None:
        """Drops the C++ unit's references to the parameters."""
        if self.unit is not None:
            self.unit.reshard()
        # The `.grad`s that a conversion of the parameters leaves as they are.
        self._unconverted = [
            (parameter, parameter.shard.grad)
            for parameter in self.parameters
            if parameter.grad_dtype != OWN and parameter.shard.grad is not None
        ]
        for parameter, _ in self._unconverted:
            parameter.shard.grad = None
        if self.unit is not None:
            self.unit.detach()

    def end_conversion(self) -> None:
        taken, self._unconverted = self._unconverted, None
        self.refresh()
        for parameter, gradient in taken or ():
            shard = parameter.shard
            shard.grad = gradient.to(shard.device)

    # -- settings ---------------------------------------------------------------

    def use_groups(self) -> None:
        """The mesh's, or what the user has put in the place of one."""
        if self.unit is None:
            return
        gather, reduce = self.groups.gather, self.groups.reduce
        if self.custom_all_gather is not None:
            gather = gather.with_custom(
                all_gather=self.custom_all_gather,
                reduce_scatter=None,
            )
        if self.custom_reduce_scatter is not None:
            reduce = reduce.with_custom(
                all_gather=None,
                reduce_scatter=self.custom_reduce_scatter,
            )
        self.unit.use_groups(gather, reduce)

    def apply_prefetch(self) -> None:
        """The first forward does it again, when every unit exists."""
        ahead = (self.forward_prefetch, self.backward_prefetch)
        forward, backward = ([of.unit for of in states if of.unit] for states in ahead)
        self.settings.prefetch(forward=forward, backward=backward)

    def add_gradient_taker(self, taker: "Callable[[UnitState], None]") -> None:
        """Of an optimizer in backward: called with this whenever the unit's gradients
        have been reduced, on the stream that reduced them."""
        self.gradient_takers.append(taker)
        give = functools.partial(_give_gradients, weakref.ref(self))
        self.settings.set_on_gradients(give)

    def choose_rows(self) -> None:
        """Lets a large embedding and its gradient come in blocks of rows."""
        module = self.modules[0]
        alone = len(self.modules) == len(self.parameters) == len(self.together) == 1
        rows = alone and self.parameters[0].may_stream_rows
        if rows and wants_rows(module, original_class(module)):
            unit, weight = self.materialized(), self.parameters[0].full
            assert weight is not None
            sums_in = self.dtypes(self.parameters[0]).reduce
            fused = self.fused is not None and sums_in == torch.float32
            self.embedding_rows = EmbeddingRows(unit, weight, sums_in, fused=fused)

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
        for state in self.together:
            changed = state.enter(module, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        return args, kwargs

    def _post_forward(
        self, module: nn.Module, args: Any, output: Any, casts_output: bool = True
    ) -> Any:
        for state in reversed(self.together):
            changed = state.leave(module, args, output, casts_output)
            output = output if changed is None else changed
        return output

    def require_extensions(self) -> None:
        """Raises for a subclass without hooks, in the first forward and not earlier:
        FSDP2 lets them be set on what ``fully_shard`` and ``to_empty`` leave."""
        for parameter in self.parameters:
            if parameter.extended:
                require_hooks(local_of(parameter.shard), parameter.name)

    def materialized(self) -> _C.Unit:
        """The C++ unit; raises while a parameter is on the meta device, or another."""
        self.refresh()
        if self.unit is None:
            meta = [p.name for p in self.parameters if local_of(p.shard).is_meta]
            if not meta:
                self._refuse_elsewhere()
            raise RuntimeError(
                f"lowtide: unit '{self.name}': expected parameters with storage, got "
                f"meta tensors: {', '.join(meta)}. Call "
                f"model.to_empty(device='{self.home.type}') and initialise them, or "
                "load a checkpoint with assign=True."
            )
        return self.unit

    def _refuse_elsewhere(self) -> NoReturn:
        away = {
            p.name: local_of(p.shard).device
            for p in self.parameters
            if self._is_elsewhere(p)
        }
        raise RuntimeError(
            f"lowtide: unit '{self.name}': expected parameters on {self.home}"
            f"{' with CPUOffloadPolicy' if self.settings.host else ''}, got "
            f"{', '.join(f'{name} on {where}' for name, where in away.items())}. Call "
            f"model.to('{self.home.type}') before the forward."
        )

    def to_be_gathered(self) -> _C.Unit:
        unit = self.materialized()
        if self.root is None and unit.state == "sharded":
            self.gathered_alone = next(_numbers)
        return unit

    def _show_shards(self, *args: Any, **kwargs: Any) -> None:
        if self.unit is not None:
            self.unit.reshard()

    def _after_load(self, *args: Any, **kwargs: Any) -> None:
        self.refresh()
        for parameter in self.parameters:
            parameter.tie_again()

    def __deepcopy__(self, memo: dict[int, Any]) -> "UnitState":
        """A copied module is of no unit; only its hooks hold one, and ask this one."""
        return self


def local_of(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor


def unit_state(module: nn.Module) -> UnitState | None:
    """The state of the unit that ``module`` was passed to ``fully_shard`` for; the
    first one's, if there are several."""
    state: UnitState | None = module.__dict__.get(UNIT_STATE)
    return state


def units_of(modules: Iterable[nn.Module]) -> list[UnitState]:
    """Of all calls of ``fully_shard`` for ``modules``, each once."""
    found: dict[UnitState, None] = {}
    for module in modules:
        if (state := unit_state(module)) is not None:
            found.update(dict.fromkeys(state.together))
    return list(found)


def _text_of(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ("ranks",) * mesh.ndim
    return " x ".join(
        f"{size} {name}" for size, name in zip(mesh.shape, names, strict=True)
    )


def _with_alive(
    reference: weakref.ref[UnitState], function: Callable[[UnitState], None]
) -> None:
    state = reference()
    assert state is not None
    function(state)


def _give_gradients(reference: weakref.ref[UnitState]) -> None:
    state = reference()
    assert state is not None
    for take in state.gradient_takers:
        take(state)


def _refuse_replaced(state: "weakref.ref[UnitState]", index: int, name: str) -> None:
    """Raises for a parameter that is not where `fully_shard` left it, shard or
    full."""
    alive = state()
    assert alive is not None
    parameter = alive.parameters[index]
    found = next(
        there
        for module, slot in parameter.slots
        if slot == name
        and (there := module._parameters.get(name)) is not parameter.shard
        and there is not parameter.full
    )
    owner = owner_of(found) if found is not None else None
    if found is None:
        got = "none"
    elif owner is not None:
        got = f"that of {owner.name}, to which it has been tied"
    else:
        got = f"another {type(found).__name__} of shape {tuple(found.shape)}"
    raise ValueError(
        f"lowtide: {parameter.name}: expected the parameter that fully_shard left "
        f"there, got {got} since. Replace, tie or remove a parameter before "
        "fully_shard; to change its values, load a state dict or write to the DTensor "
        "in place."
    )


def _wrap_gradients(
    specs: list[DTensorSpec], indices: list[int], locals_: list[torch.Tensor]
) -> list[torch.Tensor]:
    # Without DTensor.__init__, which does nothing at five times the price.
    return [
        DTensor.__new__(DTensor, local, specs[i], requires_grad=False)
        for i, local in zip(indices, locals_, strict=True)
    ]
