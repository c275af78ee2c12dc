"""``lowtide.optimize_in_backward``: every unit is stepped as soon as it is reduced, so
that gradients of one or two units are all there ever are."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide._base.backward import PerBackward
from lowtide._sharding import stepped
from lowtide._sharding.device_steps import DeviceSteps, device_steps_of
from lowtide._sharding.local_parameter import sharded_of
from lowtide._sharding.neighbours import Neighbours
from lowtide._sharding.owners import replacements
from lowtide._sharding.step_on_rows import Rows
from lowtide._sharding.unit import UnitState, units_of
from lowtide.in_backward.norms import Norm, coefficient, norms_of, scale_, total_norm
from lowtide.in_backward.parked import HostBytes, Parked
from lowtide.in_backward.unit_step import Chosen, step_chosen
from lowtide.saving.background import let_snapshots_finish

__all__ = ["Clip", "optimize_in_backward"]

Clip = Literal["exact", "late"]
_Optimizer = TypeVar("_Optimizer", bound=Optimizer)


def optimize_in_backward(
    model: nn.Module,
    optimizer: type[_Optimizer] | _Optimizer,
    *,
    params: Iterable[Any] | None = None,
    max_norm: float | None = None,
    clip: Clip = "exact",
    **settings: Any,
) -> _Optimizer:
    """An optimizer that steps each unit of ``model`` when its gradients have been
    reduced, in backward and on the stream that reduces, and drops them: sharded
    gradients never exist whole on the device. Parameters and states get the bits that
    the same optimizer gives behind the backward. ::

        optimizer = lowtide.optimize_in_backward(model, torch.optim.AdamW, lr=1e-4)
        for batch in loader:
            loss(model, batch).backward()  # steps
            optimizer.step()               # ends the step
            optimizer.zero_grad()

    The loop stays what it is. ``step()`` ends the step of a backward that reduced, and
    steps what is not the units': parameters that no unit shards, gradients that
    somebody has set. Schedulers, state dicts, ``torch.distributed.checkpoint`` and
    :func:`lowtide.save` take the optimizer as any other; hooks of its steps run in
    ``step()``, once. Microbatches without sync accumulate; the one that reduces steps.
    A parameter without a gradient on any rank is not stepped.

    Args:
        optimizer: A class, made with ``params``, by default ``model.parameters()``, and
            ``settings``; or an optimizer of parameters of the model, or of
            :func:`lowtide.local_parameters`. Its step must change parameters and
            their states and nothing else. Those of ``torch.optim`` that work element
            by element see this rank's rows as plain tensors, others the ``DTensor``.
        params: As the class takes them, groups with settings of their own too.
        max_norm: Clips all of the optimizer's gradients by their total L2 norm, as
            ``torch.nn.utils.clip_grad_norm_``, which raises on such a model.
            ``optimizer.grad_norm`` has the norm, of before the clipping, from
            ``step()`` on.
        clip: ``"exact"``: torch's bits. Gradients wait in page-locked host memory, 4
            bytes for each fp32 element of this rank's shards, and ``step()`` brings
            them back unit by unit. ``"late"``: gradients are scaled at once by what
            the norm of the step before asks for, which are other numbers; the first
            step, and the first behind ``load_state_dict``, is exact.

    Raises:
        ValueError: For a model without units, and an optimizer that has none of their
            parameters, or some that another steps in backward, or asks for a closure.
        RuntimeError: In a second backward that reduces before ``step()``; from
            ``step()``, ``state_dict()`` and the next backward once one raised that had
            stepped some of the units, until states are loaded or ``lowtide.step`` has
            undone it; from ``clip_grad_norm_``, ``clip_grad_value_`` and
            ``torch.amp.GradScaler`` when they find no gradients.
    """
    if clip not in get_args(Clip):
        raise ValueError(
            f"lowtide: optimize_in_backward: expected clip of {get_args(Clip)}, got "
            f"{clip!r}. Leave it out for torch's bits."
        )
    units = units_of(model.modules())
    if not units:
        raise ValueError(
            "lowtide: optimize_in_backward: expected a model sharded by lowtide, got "
            f"{type(model).__name__} without a unit. Call fully_shard or wrap first."
        )
    if isinstance(optimizer, Optimizer):
        if params is not None or settings:
            raise ValueError(
                "lowtide: optimize_in_backward: expected params and settings with a "
                "class of optimizers, got them with an optimizer. Set its param_groups."
            )
        made = optimizer
    else:
        made = optimizer(model.parameters() if params is None else params, **settings)
    _require_steppable(made, units)
    _InBackward(made, units, max_norm, clip)
    return made


def _require_steppable(optimizer: Optimizer, units: list[UnitState]) -> None:
    name = type(optimizer).__name__
    stepped_already = {
        id(p)
        for state in units
        for take in state.gradient_takers
        for p in _parameters(take.__self__._optimizer)
    }
    if any(id(p) in stepped_already for p in _parameters(optimizer)):
        raise ValueError(
            f"lowtide: optimize_in_backward: expected, for {name}, parameters that are "
            "stepped behind the backward, got some that an optimizer steps in it "
            "already. Keep that one, or build the model anew."
        )
    shards = {id(owner.shard) for state in units for owner in state.parameters}
    if all(id(p) not in shards for p in _parameters(optimizer)):
        raise ValueError(
            f"lowtide: optimize_in_backward: expected an optimizer of the model's "
            f"sharded parameters, got {name} with none of them. Make it behind "
            "fully_shard, of model.parameters()."
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(optimizer.step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(
            f"lowtide: optimize_in_backward: expected an optimizer whose step() takes "
            f"no arguments, got {name}, which asks for {', '.join(needed)}. Step it "
            "behind the backward."
        )


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from map(sharded_of, group["params"])


class _InBackward:
    """What is between the units, which keep it, and an optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        units: list[UnitState],
        max_norm: float | None,
        clip: Clip,
    ) -> None:
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._late = clip == "late"
        self._host: dict[UnitState, HostBytes] = {}
        # By id, of the optimizer's parameters: the group, and the place among all.
        self._places: dict[int, tuple[int, int]] = {}
        self._known: dict[int, Tensor] = {}  # by the sharded parameter's id
        self._rows: dict[UnitState, Rows] = {}
        self._neighbours = Neighbours()
        self._of_backward: PerBackward[DeviceSteps] = PerBackward()
        self._stamp: Any = None
        # Of this step. In the optimizer, so that lowtide.step brings them back, too.
        self._record: list[stepped.Stepped]
        self._parked: list[tuple[Any, int, Parked]]
        self._norms: list[Norm]
        self._record, self._parked, self._norms = stepped.attach(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(self._require_whole)
        optimizer.register_load_state_dict_post_hook(stepped.loaded)
        if max_norm is not None:
            self._drop_when_cleared()
        for state in units:
            state.add_gradient_taker(self.take)

    # -- in backward ------------------------------------------------------------------

    @torch.no_grad()
    def take(self, state: UnitState) -> None:
        """The gradients of a unit are there, on the current stream."""
        chosen = self._chosen(state)
        if not chosen:
            return
        root = state.root
        assert root is not None
        self._require_next(root, state)
        of_unit = (p for _, ps in chosen for p in ps)
        parameters = [p for p in of_unit if sharded_of(p).grad is not None]
        gradients = [sharded_of(p).grad for p in parameters]
        if self._max_norm is not None:
            places = [self._places[id(p)][1] for p in parameters]
            self._norms += norms_of(places, gradients)
            by_late = self._by_late()
            if by_late is None:
                host = self._host.setdefault(state, HostBytes(state.name, state.device))
                sharded = list(map(sharded_of, parameters))
                parked = Parked(sharded, host, state)
                self._parked.append((root, root.backwards, parked))
                return
            scale_(gradients, by_late)
        let_snapshots_finish()
        self._record.append((root, root.backwards, state.name))
        self._step(state, chosen)
        for p in parameters:
            sharded_of(p).grad = None
        root.optimizer_stepped()
        steps = device_steps_of(self._optimizer)
        if steps is not None and steps.brings_parameters:
            # Whoever reads one behind the backward finds what the step wrote.
            self._of_backward.get(lambda: steps, DeviceSteps.settle)

    def _chosen(self, state: UnitState) -> Chosen:
        """All of the optimizer's that the unit has, if any has a gradient."""
        self._look_at_groups()
        if all(owner.shard.grad is None for owner in state.parameters):
            return []
        return self._by_group(owner.shard for owner in state.parameters)

    def _by_group(self, shards: Iterable[Any]) -> Chosen:
        by_group: dict[int, list[Tensor]] = {}
        for shard in shards:
            if (known := self._known.get(id(shard))) is not None:
                by_group.setdefault(self._places[id(known)][0], []).append(known)
        return sorted(by_group.items())

    def _step(self, state: UnitState, chosen: Chosen) -> None:
        rows = self._rows.setdefault(state, Rows())
        step_chosen(self._optimizer, state, chosen, rows, self._neighbours)

    def _look_at_groups(self) -> None:
        groups = self._optimizer.param_groups
        stamp = (replacements(), [len(group["params"]) for group in groups])
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self._known, self._places = {}, {}
        self._rows, self._neighbours = {}, Neighbours()
        for number, group in enumerate(groups):
            for p in group["params"]:
                self._known[id(sharded_of(p))] = p
                self._places[id(p)] = (number, len(self._places))

    def _require_next(self, root: Any, state: UnitState) -> None:
        """Nothing is left of another backward."""
        if not self._record and any(
            of is root and number != root.backwards and not root.ended(number)
            for of, number, _ in self._parked
        ):
            self._drop()  # as that backward was
        before = [
            number
            for of, number, _ in (*self._record, *self._parked)
            if of is root and number != root.backwards
        ]
        if not before:
            return
        stepped.require_whole(self._optimizer, "backward")
        raise RuntimeError(
            "lowtide: optimize_in_backward: expected optimizer.step() behind each "
            f"backward that reduces, got another one, at unit '{state.name}'. "
            "Microbatches of one step: model.set_requires_gradient_sync(False) for all "
            "but the last."
        )

    # -- behind it --------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if stepped.in_unit(optimizer):
            return  # of a class that this one extends
        stepped.require_whole(optimizer, "step")
        self._finish()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if stepped.in_unit(optimizer):
            return
        self._finish()  # of a closure

    @torch.no_grad()
    def _finish(self) -> None:
        if self._max_norm is not None:
            self._clip_and_step(self._max_norm)
        self._record.clear()
        self._drop()
        if self._late:
            self._host.clear()  # of the first step

    def _clip_and_step(self, max_norm: float) -> None:
        optimizer = self._optimizer
        if not all(root.ended(number) for root, number, _ in self._parked):
            self._drop()
        self._look_at_groups()
        others = {
            place: gradient
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if (gradient := sharded_of(p).grad) is not None
            for _, place in (self._places[id(p)],)
        }
        norms = list(self._norms)
        if others:
            norms += norms_of(list(others), list(others.values()))
        if not norms:
            return
        sharded = [sharded_of(p) for p in self._known.values()]
        total, by = total_norm(norms, sharded), self._by_late()
        by = coefficient(max_norm, total) if by is None else by
        scale_(others.values(), by)
        for _, _, parked in self._parked:
            sharded = parked.come_back()
            scale_([p.grad for p in sharded if p.grad is not None], by)
            self._step(parked.unit, self._by_group(sharded))
            for p in sharded:
                p.grad = None
        if self._norms:  # else nobody's step: gradients that a state dict sets, say
            optimizer.grad_norm = total

    def _by_late(self) -> Tensor | None:
        """What late clipping scales by, once there is a step before."""
        before = self._optimizer.grad_norm
        if not self._late or self._max_norm is None or before is None:
            return None
        return coefficient(self._max_norm, before)

    def _drop(self) -> None:
        self._parked.clear()
        self._norms.clear()

    def _drop_when_cleared(self) -> None:
        """``zero_grad()`` drops what is parked, too."""
        clear = self._optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if not self._record:  # units that were stepped have had theirs
                self._drop()
            clear(set_to_none)

        self._optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    # -- state dicts ------------------------------------------------------------------

    def _require_whole(self, optimizer: Optimizer) -> None:
        stepped.require_whole(optimizer, "state_dict")
