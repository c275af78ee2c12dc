"""What ``fully_shard`` turns a module into: FSDP2's methods on lowtide's units."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from lowtide import _C
from lowtide._base.backward import in_backward
from lowtide._base.classes import ClassSwap, class_name
from lowtide._sharding.buffers_of_group import (
    BufferedAllGather,
    BufferedReduceScatter,
    GroupBuffers,
    SymmetricBuffers,
)
from lowtide._sharding.conversions import converted
from lowtide._sharding.groups import one_communicator
from lowtide._sharding.unit import UnitState, alive, unit_state, units_of
from lowtide._torch_version import GradientReductionHandle


class _PlaceOfOriginal:
    """The place of the class that a module had before, among its bases. Other classes
    may have been put in front of FSDP's: ``lowtide.checkpoint`` does."""

    def __get__(self, module: object, owner: Any) -> int:
        place: int = owner.__mro__.index(owner._original_class)
        return place


def is_of_torch(module: nn.Module) -> bool:
    """Whether torch's ``fully_shard`` or ``replicate`` made ``module`` its own."""
    return isinstance(module, TorchFSDPModule) and not isinstance(module, FSDPModule)


class FSDPModule(TorchFSDPModule):
    """A module whose parameters lowtide shards. ``isinstance`` of torch's
    ``FSDPModule`` too, with the same methods. Settings take effect with the next
    forward and must be the same on every rank."""

    # torch's __new__ builds the class at that place, as slicing an nn.Sequential asks.
    _orig_cls_mro_index = _PlaceOfOriginal()

    def reshard(self) -> None:
        """Frees this unit's full parameters and registers the shards. Not
        recursive."""
        for state in self._states(recurse=False):
            if state.unit is not None:
                state.unit.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters and registers the full ones. Not recursive.
        With ``async_op`` only issues the gather and returns a handle to wait on."""
        units = [state.to_be_gathered() for state in self._states(recurse=False)]
        for unit in units:
            unit.gather()
        handle = _UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does what ``nn.Module.zero_grad`` does, also while the full parameters are
        registered, and for gradients that wait for a reduction."""
        assert isinstance(self, nn.Module)
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for state in self._states(recurse=True):
            for parameter in state.parameters:
                if (gradient := parameter.shard.grad) is not None:
                    if set_to_none:
                        parameter.shard.grad = None
                    else:
                        gradient.zero_()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for compatibility. In FSDP2 ``False`` postpones waiting for
        reductions; lowtide has no such wait, and orders every backward's results
        before what follows it."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether the next backwards reduce gradients. Without, they accumulate in
        one flat slab a unit, in the reduce dtype. On a 2-D mesh this sets
        ``set_requires_all_reduce``, too."""
        for state in self._states(recurse):
            state.settings.gradient_sync = requires_gradient_sync
            state.settings.reduction.all_reduce = requires_gradient_sync
        if recurse:
            self._tell_replicas("set_requires_gradient_sync", requires_gradient_sync)

    def set_requires_all_reduce(
        self, requires_all_reduce: bool, *, recurse: bool = True
    ) -> None:
        """Whether the next backwards sum gradients over the replicas, on a 2-D mesh.
        Without, what was reduced over the shards is kept, in the reduce dtype."""
        for state in self._states(recurse):
            state.settings.reduction.all_reduce = requires_all_reduce
        if recurse:
            self._tell_replicas("set_requires_all_reduce", requires_all_reduce)

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
            state.settings.post_forward_group = None
            state.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward frees the full parameters; ``False`` saves the gathers of
        the next microbatch."""
        for state in self._states(recurse):
            state.settings.reshard_after_backward = reshard_after_backward
        if recurse:
            self._tell_replicas("set_reshard_after_backward", reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether resharding leaves the bytes of the full parameters in place, so that
        these keep their addresses, as the capture of a CUDA graph wants, and what was
        gathered last can be read. They stay until a reshard without, or
        :func:`lowtide.sleep`. An embedding whose rows come in blocks has none."""
        for state in self._states(recurse):
            state.settings.keep_unsharded_storage = keep
        if recurse:
            self._tell_replicas("set_keep_unsharded_storage", keep)

    def set_modules_to_forward_prefetch(  # type: ignore[override]
        self, modules: "list[FSDPModule]"
    ) -> None:
        """Units to gather ahead when this one runs forward, instead of the next in
        the recorded order."""
        for state in self._states(recurse=False):
            state.forward_prefetch = _states_of(modules)
            state.apply_prefetch()

    def set_modules_to_backward_prefetch(  # type: ignore[override]
        self, modules: "list[FSDPModule]"
    ) -> None:
        """Units to gather ahead when this one runs backward, instead of the one
        before it in forward."""
        for state in self._states(recurse=False):
            state.backward_prefetch = _states_of(modules)
            state.apply_prefetch()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the sum of this unit's gradients by ``factor`` instead of the number
        of ranks. Not recursive."""
        for state in self._states(recurse=False):
            state.settings.reduction.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's former name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Collectives of this unit's gradients only sum; a division follows. Not
        recursive."""
        for state in self._states(recurse=False):
            state.settings.reduction.sum_only = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters that got no gradient in a backward are reduced as zeros
        and have a ``.grad`` in any case, zeros where no rank has one. Without, they are
        reduced as well, so that ranks may use different ones, but ``.grad`` stays None
        where no rank has one, and a rank that left one out asks for that at the end of
        the backward: its host waits there for the device. A graph captures such a step
        with the answers of the one before it, and replays that are told others
        raise."""
        for state in self._states(recurse):
            state.settings.reduction.unused_too = reduce_scatter_unused_params
        if recurse:
            self._tell_replicas(
                "set_reduce_scatter_unused_params", reduce_scatter_unused_params
            )

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Accepted. (FSDP2: how many units' gradients may be on their way at once.
        Here they leave through a ring of two slots, from 64 ranks on of one, whose
        bytes do not grow with the units': no setting makes it more or fewer.)"""
        if isinstance(max_input_buffers, bool) or not isinstance(
            max_input_buffers, int
        ):
            raise TypeError(
                "lowtide: FSDPModule.set_reduce_scatter_max_input_buffers: expected an "
                f"int, got {type(max_input_buffers).__name__}. Leave the call out."
            )
        if max_input_buffers < 1:
            raise ValueError(
                "lowtide: FSDPModule.set_reduce_scatter_max_input_buffers: expected a "
                f"positive number, got {max_input_buffers}. Leave the call out."
            )

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Gathers and reduce-scatters have a communicator each, unless
        LOWTIDE_COMMUNICATORS=shared is set: anything else than that says
        raises :class:`NotImplementedError`."""
        if enable == one_communicator():
            raise NotImplementedError(
                "lowtide: set_separate_reduce_scatter_group: expected what "
                f"LOWTIDE_COMMUNICATORS says, {not enable}, got {enable}. Set it to "
                "separate or shared before the program starts, for all units."
            )

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """``False``: backward does not read this unit's parameters, do not gather
        them for it. lowtide finds this out by itself for an embedding. Not
        recursive."""
        for state in self._states(recurse=False):
            state.settings.unshard_in_backward = unshard_in_backward

    def set_all_reduce_hook(
        self,
        hook: Callable[[Tensor], None],
        *,
        stream: torch.Stream | None = None,
    ) -> None:
        """``hook(row)`` changes reduced gradients in place before they become
        ``.grad``; rows come in the same order on every rank. A row is a part of the
        unit's gradients (FSDP2: all of them) and may end in padding and flags, so what
        it does must act on every element alike, as a sum over more ranks does. It must
        not use the mesh's own groups. Not recursive.

        ``stream`` is not supported: the hook runs on lowtide's stream for reductions,
        which is the current one.
        """
        if stream is not None:
            raise NotImplementedError(
                "lowtide: FSDPModule.set_all_reduce_hook: expected stream=None, got "
                f"{stream}. Switch to it inside the hook, and make the current stream "
                "wait for it."
            )
        state = self._only_state("set_all_reduce_hook")
        state.settings.reduction.set_hook(hook)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gathers this unit's parameters through ``comm``: one flat uint8 input and
        output from its ``allocate``, copied in and out. Not recursive."""
        state = self._only_state("set_custom_all_gather")
        state.custom_all_gather = comm
        state.use_groups()

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduces this unit's gradients through ``comm``, chunk by chunk, on buffers
        from its ``allocate``. Not recursive."""
        state = self._only_state("set_custom_reduce_scatter")
        state.custom_reduce_scatter = comm
        state.use_groups()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Uses the process group's allocator for collectives' buffers, at the price of
        a copy in and out. Not recursive, not together with custom objects."""
        buffers = GroupBuffers if enable else None
        setting = "set_allocate_memory_from_process_group_for_comm"
        self._allocate_by(setting, buffers, buffers)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gathers through buffers of the symmetric memory of ``backend``, torch's
        name for it, which NCCL may gather in its symmetric kernels; by copy engines
        only if the group was made with ``options.config.cta_policy`` of zero CTAs, or
        under NCCL_CTA_POLICY=ZERO. lowtide sets neither, no GPU has run it here, and
        the phantom's clock counts gathers as ever. A copy in and out, as FSDP2's.
        Reductions too where :meth:`set_force_sum_reduction_for_comms` was called
        before: NCCL's only sum. Every rank calls it; not recursive.

        Raises:
            ValueError: On a mesh of CPUs.
            AssertionError: If this module has a custom comm object.
        """
        state = self._get_fsdp_state()
        if state.device.type == "cpu":
            raise ValueError(
                "lowtide: FSDPModule.set_symm_mem_for_comm: expected parameters on an "
                "accelerator, got a mesh of CPUs. Leave the call out."
            )
        buffers = functools.partial(SymmetricBuffers, backend=backend)
        sums = state.settings.reduction.sum_only
        self._allocate_by("set_symm_mem_for_comm", buffers, buffers if sums else None)

    def _allocate_by(self, setting: str, gather: Any, reduce: Any) -> None:
        """Gives each unit of this module comm objects on such buffers of its groups;
        None: the groups' own collectives."""
        first = self._get_fsdp_state()  # custom objects are a single unit's
        for comm in (first.custom_all_gather, first.custom_reduce_scatter):
            if not isinstance(comm, BufferedAllGather | BufferedReduceScatter | None):
                raise AssertionError(
                    f"lowtide: FSDPModule.{setting}: expected no custom comm object, "
                    f"got {type(comm).__name__}. It allocates its own buffers: remove "
                    "one of the two calls."
                )
        for state in self._states(recurse=False):
            gathers, reduces = (
                group.process_group
                for group in (state.groups.gather, state.groups.reduce)
            )
            state.custom_all_gather = (
                BufferedAllGather(gather(gathers)) if gather else None
            )
            state.custom_reduce_scatter = (
                BufferedReduceScatter(reduce(reduces)) if reduce else None
            )
            state.use_groups()

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The current stream waits for ``event`` at once, and every gather issued from
        now on with it: behind what else that stream has, whose memory it writes to.
        (FSDP2's gathers wait for the event alone.) One that is to overlap what follows
        an optimizer is asked for there: ``unshard(async_op=True)``."""
        device = self._get_fsdp_state().device
        if device.type != "cpu":
            # The device's own stream: torch.Stream.wait_event takes a
            # torch.cuda.Event for one that was never recorded, and waits for nothing.
            torch.get_device_module(device).current_stream(device).wait_event(event)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Accepted for compatibility: a backward without sync is finalized by
        :meth:`finalize_backward` in either case, one with sync at its own end."""
        self._tell_replicas("set_manual_backward_finalization", enabled)

    def finalize_backward(self, *, async_op: bool = False) -> Any:
        """Reduces what backwards without sync have accumulated, in the whole model, and
        frees full parameters, as :meth:`set_requires_gradient_sync` and
        :meth:`set_reshard_after_backward` now say. With ``async_op`` returns a handle
        to wait on; the host never waits: what follows is ordered behind.

        Raises:
            RuntimeError: Within a backward; for sums over shards that wait for the
                replicas', which are sent in a backward."""
        state = self._get_fsdp_state()
        if in_backward():
            raise RuntimeError(
                "lowtide: FSDPModule.finalize_backward: expected a backward that is "
                "over, got one under way. Call it behind backward()."
            )
        if state.settings.gradient_sync:
            _require_no_partial_sums(state)
            state._root_post_backward_final_callback()
        self._tell_replicas("finalize_backward")
        return _Finalized() if async_op else None

    def reset_iter_state(self) -> None:
        """What :func:`lowtide.abort_step` does, of the root alone: another unit raises
        :class:`RuntimeError`. Gradients accumulated since the last optimizer step are
        dropped."""
        state = self._get_fsdp_state()
        if state.root is None:
            return
        if not state.explains_errors:
            raise RuntimeError(
                "lowtide: reset_iter_state: expected the root, got the unit "
                f"{state.name!r} inside it. Call it on the module that is called first."
            )
        state.root.abort()

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing to choose: lowtide's buffers come from the compute stream's pool
        whichever way a gather is issued."""

    def _states(self, recurse: bool) -> list[UnitState]:
        assert isinstance(self, nn.Module)
        return units_of(self.modules() if recurse else [self])

    def _tell_replicas(self, method: str, *values: Any) -> None:
        """What torch's ``replicate`` keeps inside of this module is told what FSDP2
        tells it: each outermost one, which is a root of its own."""

        def tell(module: nn.Module) -> None:
            if not is_of_torch(module):
                for child in module.children():
                    tell(child)
            elif hasattr(module, method):
                getattr(module, method)(*values)
            else:
                raise NotImplementedError(
                    f"lowtide: FSDPModule.{method}: expected no {class_name(module)} "
                    f"inside, got one, whose {method} torch {torch.__version__} does "
                    "not have. Leave the call out."
                )

        assert isinstance(self, nn.Module)
        tell(self)

    def _only_state(self, method: str) -> UnitState:
        """Raises where the parameters are on several meshes, as FSDP2 does."""
        state = self._get_fsdp_state()
        if (number := len(state.together)) > 1:
            raise ValueError(
                f"lowtide: FSDPModule.{method}: expected a module whose parameters are "
                f"all on one mesh, got one of {number} meshes: which it is for is not "
                "said. Shard what has a mesh of its own by a call of its own."
            )
        return state

    def _get_fsdp_state(self) -> UnitState:  # type: ignore[override]
        assert isinstance(self, nn.Module)
        state = unit_state(self)
        assert state is not None
        return state

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        with converted(self._states(recurse=False)):
            return nn.Module._apply(self, *args, **kwargs)  # type: ignore[arg-type]


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: FSDPModule, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"lowtide: FSDPModule.{name}: expected a method that lowtide has, got one "
            f"that only torch {torch.__version__} has. Leave the call out."
        )

    return refuse


# A method of a later FSDP2 would look for torch's state.
for _name in {name for name in vars(TorchFSDPModule) if not name.startswith("_")}:
    if _name not in vars(FSDPModule):
        setattr(FSDPModule, _name, _refused(_name))


def _require_no_partial_sums(state: UnitState) -> None:
    for other in alive:
        unit = other.unit if other.root is state.root else None
        if unit is None or unit.accumulating or not unit.waiting_buffers:
            continue
        raise RuntimeError(
            "lowtide: FSDPModule.finalize_backward: expected gradients that wait for "
            f"all of their reduction, got those of the unit {unit.name!r}, summed but "
            "for the replicas. Call set_requires_all_reduce(True) before the last "
            "microbatch's backward."
        )


class _Finalized(GradientReductionHandle):
    def wait(self) -> None:
        """Nothing is left to wait for."""


class _UnshardHandle(UnshardHandle):
    def __init__(self, units: list[_C.Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        for unit in self._units:
            unit.unshard()
        self._units = []


def _states_of(modules: Iterable[Any]) -> list[UnitState]:
    states: list[UnitState] = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                "lowtide: prefetch list: expected modules sharded by lowtide, got "
                f"{type(module).__name__}. Call fully_shard on it first."
            )
        states += module._states(recurse=False)
    return states


# -- becoming an FSDPModule ---------------------------------------------------------


def _fsdp_class(original: type) -> type:
    """:class:`FSDPModule` in front of the program's class."""
    members: dict[str, Any] = {
        "__deepcopy__": _refuse_deepcopy,
        "_original_class": original,
    }
    if original is nn.Embedding:
        members["forward"] = _embedding_forward
    elif issubclass(original, nn.Embedding):
        members["forward"] = _forward_of(original)
    return type(f"FSDP{original.__name__}", (FSDPModule, original), members)


_sharded = ClassSwap(_fsdp_class)


def become_fsdp_module(module: nn.Module) -> None:
    _sharded.apply(module)


# `input`, as in nn.Embedding.forward: callers may pass it by name.
def _embedding_forward(self: nn.Embedding, input: Tensor) -> Tensor:
    state = unit_state(self)
    assert state is not None
    if state.embedding_rows is None:
        return nn.Embedding.forward(self, input)
    return state.embedding_rows.forward(self, input)


def _forward_of(original: type[nn.Embedding]) -> Callable[..., Any]:
    @functools.wraps(original.forward)
    def forward(self: nn.Embedding, *args: Any, **kwargs: Any) -> Any:
        state = unit_state(self)
        assert state is not None
        if state.embedding_rows is None:
            return original.forward(self, *args, **kwargs)
        return state.embedding_rows.run(original.forward, self, *args, **kwargs)

    return forward


def _refuse_deepcopy(module: nn.Module, memo: object) -> NoReturn:
    raise AssertionError(
        f"lowtide: {class_name(module)}: expected a module that is not sharded to "
        "deepcopy, got a sharded one. Use state_dict, or copy before fully_shard."
    )


def register_hooks(first: UnitState) -> None:
    """Units of one call are entered in their order and left in reverse."""
    for state in reversed(first.together):
        for module in state.modules:
            module.register_forward_pre_hook(
                state.enter, prepend=True, with_kwargs=True
            )
            module.register_forward_hook(state.leave, prepend=False)
