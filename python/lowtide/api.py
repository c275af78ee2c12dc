"""``fully_shard`` and what it turns modules into: FSDP2's names, keywords, defaults."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import OffloadPolicy, UnshardHandle
from torch.distributed.tensor import Shard

from lowtide._state import modules as managed
from lowtide._state.unit import UnitState, unit_state
from lowtide.policies import MixedPrecisionPolicy

__all__ = ["FSDPModule", "UnshardHandle", "abort_step", "fully_shard"]

_DEFAULT_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> "FSDPModule": ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> list["FSDPModule"]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = _DEFAULT_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shards the parameters of ``module`` over ``mesh``, in place; drop-in for
    ``torch.distributed.fsdp.fully_shard``.

    One call makes one unit: the parameters of ``module`` (or of a list of modules
    that run together) that no earlier call manages are gathered, freed and reduced
    together. Call it bottom-up, ending with the root. Between steps parameters are
    ``DTensor`` with ``Shard(0)``; names, shapes and ``requires_grad`` stay.

    Args:
        module: A module with a ``forward``, or a list of them.
        mesh: 1-D mesh to shard over; by default all ranks.
        reshard_after_forward: Free the full parameters after forward and gather
            them again in backward. ``None``: yes, except for the root.
        mp_policy: Dtypes for compute, reduction, inputs and outputs; torch's own.
        ignored_params: Parameters to leave alone.
        shard_placement_fn, offload_policy: Only their defaults are supported.

    Returns:
        The same module(s), now instances of :class:`FSDPModule`.

    Raises:
        NotImplementedError: For a setting lowtide does not support, naming it.
        ValueError: For a module or parameter that can not be sharded.
    """
    roots = (module,) if isinstance(module, nn.Module) else tuple(module)
    _check_modules(roots)
    mesh = mesh if mesh is not None else _default_mesh()
    _check_settings(mesh, shard_placement_fn, offload_policy)
    reshard = _as_bool(reshard_after_forward, mesh)
    device = _device_of(mesh)
    modules = managed.managed_modules(roots)
    parameters = managed.managed_parameters(modules, ignored_params or set())
    managed.move_to_device(modules, parameters, device)

    state = UnitState(roots, mesh, device, mp_policy, reshard)
    state.shard(parameters)
    for one in modules:
        # torch.compile then treats parameters as it does FSDP2's.
        one._is_fsdp_managed_module = True  # type: ignore[assignment]
        one._fsdp_use_orig_params = True  # type: ignore[assignment]
    _register_hooks(state)
    for one in roots:
        _become_fsdp_module(one)
    return module


def abort_step(model: nn.Module) -> None:
    """Returns every unit of ``model`` to a clean state after an exception: waits for
    what is in flight, frees gathered parameters and buffers, and drops all gradients
    accumulated since the last optimizer step. The next root forward does this by
    itself; call it to free the memory earlier. Does nothing before the first forward.
    """
    roots = {
        state.root
        for module in model.modules()
        if (state := unit_state(module)) is not None and state.root is not None
    }
    for root in roots:
        root.abort()


class FSDPModule(TorchFSDPModule):
    """A module whose parameters lowtide shards. ``isinstance`` of torch's
    ``FSDPModule`` too, with the same methods; what is not supported raises
    NotImplementedError by name."""

    # [FSDP<Original>, lowtide's FSDPModule, torch's FSDPModule, Original, ...]
    _orig_cls_mro_index = 3

    def reshard(self) -> None:
        """Frees this unit's full parameters and registers the shards. Not
        recursive."""
        state = self._get_fsdp_state()
        if state.unit is not None:
            state.unit.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters and registers the full ones. Not recursive.
        With ``async_op`` only issues the gather and returns a handle to wait on."""
        unit = self._get_fsdp_state().materialized()
        if not async_op:
            unit.unshard()
            return None
        unit.gather()
        return _UnshardHandle(unit)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for compatibility. In FSDP2 ``False`` postpones waiting for
        reductions; lowtide never lets the host wait for them, and orders every
        backward's results before what follows it."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether the next backwards reduce gradients. Without, they accumulate in
        one flat slab a unit, in the reduce dtype."""
        self._set("gradient_sync", requires_gradient_sync, recurse)

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, recurse: bool = True
    ) -> None:
        """Changes the argument of ``fully_shard`` for the next forwards."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                "lowtide: set_reshard_after_forward: expected a bool, got "
                f"{type(reshard_after_forward).__name__}. Pass True or False."
            )
        for state in self._states(recurse):
            state.auto_reshard = False
        self._set("reshard_after_forward", reshard_after_forward, recurse)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward frees the full parameters; ``False`` saves the gathers of
        the next microbatch."""
        self._set("reshard_after_backward", reshard_after_backward, recurse)

    def set_modules_to_forward_prefetch(  # type: ignore[override]
        self, modules: "list[FSDPModule]"
    ) -> None:
        """Units to gather ahead when this one runs forward, instead of the next in
        the recorded order."""
        unit = self._get_fsdp_state().materialized()
        unit.set_forward_prefetch(_units_of(modules))

    def set_modules_to_backward_prefetch(  # type: ignore[override]
        self, modules: "list[FSDPModule]"
    ) -> None:
        """Units to gather ahead when this one runs backward, instead of the one
        before it in forward."""
        unit = self._get_fsdp_state().materialized()
        unit.set_backward_prefetch(_units_of(modules))

    def _set(self, name: str, value: bool, recurse: bool) -> None:
        for state in self._states(recurse):
            state.set(name, value)

    def _states(self, recurse: bool) -> Iterator[UnitState]:
        assert isinstance(self, nn.Module)
        for module in self.modules() if recurse else [self]:
            if (state := unit_state(module)) is not None:
                yield state

    def _get_fsdp_state(self) -> UnitState:  # type: ignore[override]
        assert isinstance(self, nn.Module)
        state = unit_state(self)
        assert state is not None
        return state

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        state = self._get_fsdp_state()
        state.detach()
        try:
            return nn.Module._apply(self, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            state.refresh()


def _not_supported(name: str) -> Callable[..., NoReturn]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"lowtide: FSDPModule.{name}: expected a method lowtide supports, got "
            f"{name}. Remove the call, or use torch.distributed.fsdp for this model."
        )

    method.__name__ = name
    method.__doc__ = "Raises NotImplementedError."
    return method


for _name in (
    "set_requires_all_reduce",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_post_optim_event",
    "set_reduce_scatter_divide_factor",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_unshard_in_backward",
    "set_allocate_memory_from_process_group_for_comm",
    "_set_unshard_async_op",
):
    setattr(FSDPModule, _name, _not_supported(_name))


class _UnshardHandle(UnshardHandle):
    def __init__(self, unit: Any) -> None:
        self._unit: Any = unit

    def wait(self) -> None:
        if self._unit is not None:
            self._unit.unshard()
            self._unit = None


# -- checks -----------------------------------------------------------------------


def _check_modules(roots: tuple[nn.Module, ...]) -> None:
    if not roots:
        raise ValueError(
            "lowtide: fully_shard: expected a module or a list of modules, got an "
            "empty list. Pass at least one module."
        )
    for root in roots:
        name = type(root).__name__
        if isinstance(root, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"lowtide: fully_shard: expected a module with a forward, got {name}. "
                "Call it on the modules inside."
            )
        if managed.is_unit(root):
            raise ValueError(
                f"lowtide: fully_shard: expected a module that is not sharded yet, got "
                f"{name}, which is. Call fully_shard once for each module."
            )


def _check_settings(
    mesh: DeviceMesh,
    shard_placement_fn: object,
    offload_policy: OffloadPolicy,
) -> None:
    if mesh.ndim != 1:
        raise NotImplementedError(
            f"lowtide: fully_shard: expected a 1-D mesh, got {mesh.ndim} dimensions "
            f"({mesh}). Hybrid sharding is not supported yet: pass one dimension, "
            "mesh['name']."
        )
    if shard_placement_fn is not None:
        raise NotImplementedError(
            "lowtide: fully_shard: expected shard_placement_fn=None, got "
            f"{shard_placement_fn}. Parameters are sharded on dim 0."
        )
    if type(offload_policy) is not OffloadPolicy:
        raise NotImplementedError(
            "lowtide: fully_shard: expected offload_policy=OffloadPolicy(), got "
            f"{offload_policy}. Parameter offload is not supported."
        )


def _as_bool(reshard_after_forward: bool | int | None, mesh: DeviceMesh) -> bool | None:
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if isinstance(reshard_after_forward, int):
        if reshard_after_forward == mesh.size():
            return True
        if reshard_after_forward == 1:
            return False
        raise NotImplementedError(
            "lowtide: fully_shard: expected reshard_after_forward to be a bool or the "
            f"mesh size {mesh.size()}, got {reshard_after_forward}. Resharding to a "
            "smaller mesh is not supported."
        )
    raise ValueError(
        "lowtide: fully_shard: expected reshard_after_forward to be a bool or None, "
        f"got {reshard_after_forward!r}. Pass True, False or None."
    )


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _units_of(modules: Iterable[Any]) -> list[Any]:
    units = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                "lowtide: prefetch list: expected modules sharded by lowtide, got "
                f"{type(module).__name__}. Call fully_shard on it first."
            )
        units.append(module._get_fsdp_state().materialized())
    return units


# -- becoming an FSDPModule ---------------------------------------------------------

_fsdp_classes: "weakref.WeakKeyDictionary[type, type]" = weakref.WeakKeyDictionary()


def _become_fsdp_module(module: nn.Module) -> None:
    """Puts :class:`FSDPModule` first in the module's class."""
    original = type(module)
    fsdp_class = _fsdp_classes.get(original)
    if fsdp_class is None:
        members: dict[str, Any] = {"__deepcopy__": _refuse_deepcopy}
        if original is nn.Embedding:
            members["forward"] = _embedding_forward
        fsdp_class = type(f"FSDP{original.__name__}", (FSDPModule, original), members)
        _fsdp_classes[original] = fsdp_class
    module.__class__ = fsdp_class


def _embedding_forward(module: nn.Embedding, indices: Tensor) -> Tensor:
    state = unit_state(module)
    assert state is not None
    if state.embedding_rows is None:
        return nn.Embedding.forward(module, indices)
    return state.embedding_rows.forward(module, indices)


def _refuse_deepcopy(module: nn.Module, memo: object) -> NoReturn:
    raise AssertionError(
        f"lowtide: {type(module).__name__}: expected a module that is not sharded to "
        "deepcopy, got a sharded one. Use state_dict, or copy before fully_shard."
    )


def _register_hooks(state: UnitState) -> None:
    if len(state.modules) == 1:
        module = state.modules[0]
        module.register_forward_pre_hook(
            state.hooks.pre, prepend=True, with_kwargs=True
        )
        module.register_forward_hook(state.hooks.post, prepend=False)
        return
    _GroupHooks(state).register()


class _GroupHooks:
    """For modules sharded together: before the first that runs, after the last."""

    def __init__(self, state: UnitState) -> None:
        self._state = state
        self._waiting: set[nn.Module] = set()

    def register(self) -> None:
        for module in self._state.modules:
            module.register_forward_pre_hook(self._pre, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post, prepend=False)

    def _pre(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._waiting:
            return None
        self._waiting = set(self._state.modules)
        return self._state.hooks.pre(module, args, kwargs)

    def _post(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._waiting.discard(module)
        if self._waiting:
            return None
        return self._state.hooks.post(module, args, output)
