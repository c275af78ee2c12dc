"""``estimate_offload``: whether a policy will pay, before anything runs."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lowtide._state import activation as state
from lowtide._state.activation import RegionState, regions
from lowtide.policies import INPUT

__all__ = ["OffloadEstimate", "RegionEstimate", "estimate_offload"]

# Below this share of the bytes, offloading does not move the peak.
WORTH_MOVING = 0.05
# Of a region's backward, its forward that runs again included, in forwards: so long
# has a copy back.
BACKWARD = 3


@dataclasses.dataclass(frozen=True)
class RegionEstimate:
    """One forward of one checkpointed module. Bytes of storages."""

    flops: int  # of its forward
    input_bytes: int  # its tensor arguments that are no parameters
    offloaded_bytes: int
    saved_bytes: int  # kept on request, beside the arguments


@dataclasses.dataclass(frozen=True)
class OffloadEstimate:
    """``print`` it for sentences."""

    regions: dict[str, RegionEstimate]
    device_bytes_without: int  # held for backward by the regions, nothing offloaded
    device_bytes_with: int
    host_bytes: int
    fixed_bytes: int  # parameters, gradients, optimizer
    bytes_per_second_needed: float  # so that the copies out hide behind forward
    bytes_per_second: float  # of the link
    exposed_seconds: float  # a step, forward and backward

    @property
    def hidden(self) -> bool:
        return self.exposed_seconds == 0

    @property
    def share_of_peak(self) -> float:
        """What offloading takes off, in all bytes known to be there."""
        saved = self.device_bytes_without - self.device_bytes_with
        return saved / max(self.device_bytes_without + self.fixed_bytes, 1)

    def __str__(self) -> str:
        return (
            f"activations of {len(self.regions)} regions: "
            f"{_gib(self.device_bytes_without)} without offload, "
            f"{_gib(self.device_bytes_with)} with, {_gib(self.host_bytes)} on the "
            "host; "
            f"{_gib(self.fixed_bytes)} of parameters, gradients and optimizer. "
            f"The copies need {_rate(self.bytes_per_second_needed)} of "
            f"{_rate(self.bytes_per_second)}; {self.exposed_seconds * 1e3:.1f} ms a "
            "step are not hidden."
        )


def estimate_offload(
    model: nn.Module,
    *args: Any,
    link_bytes_per_second: float,
    flops_per_second: float,
    fixed_bytes: int | None = None,
    **kwargs: Any,
) -> OffloadEstimate:
    """What the policies of ``model``'s checkpointed modules will do: bytes on the
    device and the host, and whether the copies hide behind compute.

    Runs ``model(*args, **kwargs)`` on tensors without bytes. Call it after
    ``checkpoint`` and before ``fully_shard``. The workspace of a single region is not
    counted.

    Args:
        link_bytes_per_second: Between device and host, one way: 25e9 is common for
            PCIe 4, 50e9 for PCIe 5.
        flops_per_second: What the model reaches, not the device's peak.
        fixed_bytes: Parameters, gradients and optimizer on this device; by default
            those of the whole model with Adam and fp32 moments.

    Warns when the peak is not set by activations, and when the link is too slow.

    Raises:
        ValueError: If no module is checkpointed, or one is sharded.
    """
    checkpointed = list(regions(model))
    if not checkpointed:
        raise ValueError(
            "lowtide: estimate_offload: expected a model with checkpointed modules, "
            f"got {type(model).__name__} without. Call lowtide.checkpoint first."
        )
    if any(hasattr(module, "_get_fsdp_state") for module in model.modules()):
        raise ValueError(
            "lowtide: estimate_offload: expected a model that is not sharded yet, got "
            f"{type(model).__name__}. Call it before fully_shard."
        )
    found = _observe(model, dict(checkpointed), args, kwargs)
    if fixed_bytes is None:
        fixed_bytes = sum(
            parameter.nbytes
            + (parameter.nbytes + 8 * parameter.numel()) * parameter.requires_grad
            for parameter in model.parameters()
        )
    estimate = _summarize(
        found,
        dict(checkpointed),
        link_bytes_per_second,
        flops_per_second,
        fixed_bytes,
    )
    _warn(estimate)
    return estimate


def _summarize(
    found: dict[str, RegionEstimate],
    states: dict[str, RegionState],
    link: float,
    flops_per_second: float,
    fixed_bytes: int,
) -> OffloadEstimate:
    offloaded = sum(region.offloaded_bytes for region in found.values())
    without = sum(r.input_bytes + r.saved_bytes for r in found.values())
    exposed = needed = 0.0
    held, stay = without, 0
    for name, region in found.items():
        policy = states[name].policy
        window = 1 + policy.prefetch + policy.keep_last
        stay = max(stay, window * region.offloaded_bytes)
        # Offloaded values from inside were not there without a policy.
        held -= min(region.offloaded_bytes, region.input_bytes)
        compute = region.flops / flops_per_second
        if region.offloaded_bytes:
            copy = region.offloaded_bytes / link
            needed = max(needed, region.offloaded_bytes / max(compute, 1e-12))
            exposed += max(0.0, copy - compute) + max(0.0, copy - BACKWARD * compute)
    held += min(stay, offloaded)
    return OffloadEstimate(
        regions=found,
        device_bytes_without=without,
        device_bytes_with=held,
        host_bytes=offloaded,
        fixed_bytes=fixed_bytes,
        bytes_per_second_needed=needed,
        bytes_per_second=link,
        exposed_seconds=exposed,
    )


def _warn(estimate: OffloadEstimate) -> None:
    if estimate.share_of_peak < WORTH_MOVING:
        saved = estimate.device_bytes_without - estimate.device_bytes_with
        warnings.warn(
            "lowtide: estimate_offload: expected activations to set the peak, got "
            f"{_gib(saved)} to take off {_gib(estimate.fixed_bytes)} of parameters, "
            f"gradients and optimizer and {_gib(estimate.device_bytes_without)} of "
            "activations. Offloading will hardly lower the peak.",
            stacklevel=3,
        )
    if not estimate.hidden:
        warnings.warn(
            "lowtide: estimate_offload: expected a link of at least "
            f"{_rate(estimate.bytes_per_second_needed)} to hide the copies, got "
            f"{_rate(estimate.bytes_per_second)}. A step will take "
            f"{estimate.exposed_seconds * 1e3:.1f} ms longer; offload less, or use "
            "larger batches or widths.",
            stacklevel=3,
        )


# -- one forward without bytes --------------------------------------------------------


class _Forward:
    """What one region's forward shows."""

    def __init__(self, region: RegionState, flops_before: int) -> None:
        self.region = region
        self.flops_before = flops_before
        self.arguments: dict[int, int] = {}  # storage -> bytes
        self.named: dict[int, tuple[str, int]] = {}  # storage -> (treatment, bytes)

    def name(self, tensor: Tensor, name: str) -> None:
        policy = self.region.policy
        treatment = policy.treatments().get(name)
        num_bytes = tensor.untyped_storage().nbytes()
        if treatment is not None and num_bytes >= policy.min_bytes:
            self.named[tensor.untyped_storage()._cdata] = (treatment, num_bytes)

    def estimate(self, flops_after: int) -> RegionEstimate:
        named = self.named.items()
        return RegionEstimate(
            flops=flops_after - self.flops_before,
            input_bytes=sum(self.arguments.values()),
            offloaded_bytes=sum(b for _, (t, b) in named if t == "offload"),
            saved_bytes=sum(
                b for key, (t, b) in named if t == "save" and key not in self.arguments
            ),
        )


class _Observer:
    """Hooks that follow one forward of a model."""

    def __init__(self, model: nn.Module, states: dict[str, RegionState]) -> None:
        self.found: dict[str, RegionEstimate] = {}
        self.counter = FlopCounterMode(display=False)
        self._states = states
        self._running: list[_Forward] = []
        self._names: dict[int, str] = {}  # by storage
        self._owned = {
            tensor.untyped_storage()._cdata
            for tensor in itertools.chain(model.parameters(), model.buffers())
        }
        modules = dict(model.named_modules())
        self._handles = []
        for name in states:
            enter = functools.partial(self._enter, name)
            leave = functools.partial(self._leave, name)
            module = modules[name]
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def on_tag(self, tensor: Tensor, name: str) -> None:
        self._names[tensor.untyped_storage()._cdata] = name
        if self._running:
            self._running[-1].name(tensor, name)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        forward = _Forward(self._states[name], self.counter.get_total_flops())
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                continue
            key = leaf.untyped_storage()._cdata
            if key in self._owned:
                continue
            forward.arguments[key] = leaf.untyped_storage().nbytes()
            forward.name(leaf, INPUT)
            if key in self._names:
                forward.name(leaf, self._names[key])
        self._running.append(forward)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        estimate = self._running.pop().estimate(self.counter.get_total_flops())
        if not self._running:  # a nested region is part of the one around it
            self.found[name] = estimate


def _observe(
    model: nn.Module, states: dict[str, RegionState], args: Any, kwargs: Any
) -> dict[str, RegionEstimate]:
    observer = _Observer(model, states)
    try:
        with (
            torch.no_grad(),
            FakeTensorMode(allow_non_fake_inputs=True) as fake,
            observer.counter,
            _observing(observer.on_tag),
        ):
            fake_args, fake_kwargs = torch.utils._pytree.tree_map_only(
                Tensor, fake.from_tensor, (args, kwargs)
            )
            model(*fake_args, **fake_kwargs)
    finally:
        observer.remove()
    return observer.found


@contextmanager
def _observing(observer: Callable[[Tensor, str], None]) -> Iterator[None]:
    state.observers.append(observer)
    try:
        yield
    finally:
        state.observers.remove(observer)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
