"""Which weights' gradients are summed in place, and the forward of their layers.

See docs/design/fused_gradients.md. A layer stays the object it was; its class becomes a
subclass with another ``forward``, which gives autograd a node that adds the weight's
gradient to where it is reduced from. Whatever the node does not cover is the layer's
own forward, and its gradient joins the sum.
"""

import weakref
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from lowtide import _C
from lowtide._base.classes import ClassSwap
from lowtide._sharding.parameter import UnitParameter
from lowtide.policies import ParameterDtypes

# The attribute that a layer keeps its FusedWeight in.
_WEIGHT = "_lowtide_fused"
# Settings by which layers of Megatron and TransformerEngine write gradients to their
# weight's `main_grad`.
_WRITES_MAIN_GRAD = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
_HALF = (torch.bfloat16, torch.float16)

# Fields of FusedUses -> why the node's products were left to autograd.
_OF_BACKWARD = {
    "hooks": "hooks on the parameter or its gradient",
    "repeated": "used more than once in a backward",
    "asked_for": "asked for by torch.autograd.grad",
    "recorded": "create_graph",
    "elsewhere": "on another stream than the forward began on",
}
# Said of a weight whose gradient came though no product did.
_UNSEEN = "not by its layer's forward"


class FusedWeights:
    """The weights of one unit whose gradients are summed in place."""

    def __init__(self) -> None:
        self._unit: _C.Unit | None = None
        self._chosen: list[bool] = []
        self._parameters: list[UnitParameter] = []
        self._weights: dict[UnitParameter, FusedWeight] = {}
        # Why weights are not fused.
        self._reasons: dict[UnitParameter, str] = {}
        # Weights whose layers add to `main_grad` themselves.
        self._main: set[UnitParameter] = set()

    def choose(
        self,
        parameters: list[UnitParameter],
        dtypes: list[ParameterDtypes],
        device: torch.device,
    ) -> None:
        """Looks at a unit's parameters, in its order; called again when they change."""
        self._parameters = list(parameters)
        self._reasons.clear()
        self._main.clear()
        weights = {}
        for parameter, its in zip(parameters, dtypes, strict=True):
            module, name = parameter.slots[0]
            main = _writes_main_grad(module) and name.startswith("weight")
            if not main and not (isinstance(module, nn.Linear) and name == "weight"):
                continue
            reason = _obstacle(parameter, its, device)
            if reason is None and not main and not has_own_forward(module):
                weight = self._weights.get(parameter) or FusedWeight(parameter)
                weights[parameter] = weight
                _take_over(module, weight)
            elif reason is None and main:
                self._main.add(parameter)
            else:
                self._reasons[parameter] = reason or "its layer has its own forward"
        for parameter, dropped in self._weights.items():
            dropped.fuses = parameter in weights
        self._weights = weights
        self._chosen = [p in weights or p in self._main for p in parameters]
        if self._unit is not None:
            self.use(self._unit)

    def leave(self) -> None:
        """Until the next :meth:`use`, which has to follow before a forward."""
        self._unit = None

    def use(self, unit: _C.Unit) -> None:
        self._unit = unit
        if len(unit.fused_uses) not in (0, len(self._chosen)):
            return  # of other parameters; `choose` follows
        unit.fuse_gradients(self._chosen)
        for index, parameter in enumerate(self._parameters):
            if parameter in self._weights:
                self._weights[parameter].bind(unit, index)
            elif parameter.full is not None:
                self.made_full(parameter)

    def made_full(self, parameter: UnitParameter) -> None:
        if parameter not in self._main or self._unit is None:
            return
        main = self._unit.main_gradient(self._parameters.index(parameter))
        if main is None:
            self._main.remove(parameter)
            self._reasons[parameter] = (
                "main_grad: a rank's rows are no multiple of 128 elements"
            )
            return
        full: Any = parameter.full
        full.main_grad, full.grad_added_to_main_grad = main, False

    def fuses(self, parameter: UnitParameter) -> bool:
        return parameter in self._weights or parameter in self._main

    def report(self) -> tuple[list[str], dict[str, str]]:
        """Names of fused weights; of others, or of uses that were not, why."""
        fused, exact = [], {}
        uses = self._unit.fused_uses if self._unit is not None else []
        for index, parameter in enumerate(self._parameters):
            if parameter in self._reasons:
                exact[parameter.name] = self._reasons[parameter]
                continue
            if not self.fuses(parameter):
                continue
            if self._unit is not None and not self._unit.in_place(index):
                exact[parameter.name] = "its gradient comes in blocks of rows"
                continue
            fused.append(parameter.name)
            if index < len(uses) and (counts := _reasons_of(uses[index])):
                exact[parameter.name] = ", ".join(
                    f"{reason} ({count} {'use' if count == 1 else 'uses'})"
                    for reason, count in counts.items()
                )
        return fused, exact


def _reasons_of(uses: _C.FusedUses) -> Counter[str]:
    """How often a weight's products were left to autograd, by why."""
    counts = Counter(uses.refused)
    counts[_UNSEEN] = uses.unexplained
    for field, reason in _OF_BACKWARD.items():
        counts[reason] = getattr(uses, field)
    return +counts


class FusedWeight:
    """Where the products of one layer go."""

    def __init__(self, parameter: UnitParameter) -> None:
        self._parameter = weakref.ref(parameter)
        self._unit: weakref.ref[_C.Unit] | None = None
        self._index = -1
        self.fuses = True

    def bind(self, unit: _C.Unit, index: int) -> None:
        self._unit, self._index = weakref.ref(unit), index

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        parameter = self._parameter()
        unit = self._unit() if self._unit is not None else None
        if (
            unit is None
            or parameter is None
            or weight is not parameter.full
            or not (torch.is_grad_enabled() and weight.requires_grad)
        ):
            return F.linear(input, weight, bias)
        if (reason := _obstacle_of_call(input, weight, bias)) is not None:
            unit.refuse_fused(self._index, reason)
            return F.linear(input, weight, bias)
        return _C.fused_linear(
            unit=unit, parameter=self._index, input=input, weight=weight, bias=bias
        )


def _linear_forward(self: nn.Linear, input: Tensor) -> Tensor:
    # There is none in a layer that was built from the class of this one.
    fused: FusedWeight | None = self.__dict__.get(_WEIGHT)
    weight = self.weight
    if fused is None:
        return F.linear(input, weight, self.bias)
    if torch.compiler.is_compiling():
        # Nothing of the layer but its tensors goes into the graph, which others share.
        if fused.fuses and _may_fuse_compiled(input, weight):
            return torch.ops.lowtide.fused_linear(input, weight, self.bias)
        return F.linear(input, weight, self.bias)
    return fused.linear(input, weight, self.bias)


def _may_fuse_compiled(input: Tensor, weight: Tensor) -> bool:
    """Asks what ``_obstacle_of_call`` asks eagerly; the answer is guarded."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and type(input) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled(input.device.type)
        and forward_ad._current_level < 0
        and input.dim() >= 2
        and input.dtype == weight.dtype
    )


# Compiled backwards call it for what it does, not for a result.
_register_effectful_op(
    torch.ops.lowtide.add_weight_gradient.default, _EffectType.ORDERED
)


# -- eligibility --------------------------------------------------------------------


def _writes_main_grad(module: nn.Module) -> bool:
    return any(getattr(module, name, False) is True for name in _WRITES_MAIN_GRAD)


def has_own_forward(module: nn.Module) -> bool:
    forward = type(module).forward
    of_linear = forward is nn.Linear.forward or forward is _linear_forward
    return "forward" in module.__dict__ or not of_linear


def _obstacle(
    parameter: UnitParameter, dtypes: ParameterDtypes, device: torch.device
) -> str | None:
    if not parameter.shard.requires_grad:
        return "frozen"
    if len(parameter.slots) > 1:
        return "several modules share it"
    if parameter.extended:
        return "a tensor subclass"
    if parameter.parallel is not None:
        return "a DTensor before it was sharded"
    if parameter.shard_dim != 0:
        return f"sharded along dimension {parameter.shard_dim}"
    if len(parameter.sizes) != 2 or parameter.sizes.numel() == 0:
        return f"no matrix: {tuple(parameter.sizes)}"
    if dtypes.any_gradient:
        return "gradients of any dtype: grad_dtype and reduce_dtype are None"
    if not _sums_in(dtypes.reduce, dtypes.compute):
        return f"{dtypes.compute} products, summed in {dtypes.reduce}"
    return _obstacle_of_device(dtypes.compute, device)


def _sums_in(reduce: torch.dtype, compute: torch.dtype) -> bool:
    return (
        reduce == torch.float32 and compute in (*_HALF, torch.float32)
    ) or reduce == compute == torch.float64


def _obstacle_of_device(compute: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "ROCm: no aten::addmm.dtype_out"
    if compute not in _HALF:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"compute capability {major}.{minor} < 8.0"
    if torch.cuda.tunable.is_enabled():
        return "TunableOp has no GEMM of half factors into fp32"
    return None


def _obstacle_of_call(input: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if type(input) is not Tensor and type(input) is not nn.Parameter:
        return f"an input that is a {type(input).__name__}"
    if torch.is_autocast_enabled(input.device.type):
        return "autocast"
    if input.dim() < 2 or input.dtype != weight.dtype:
        return "an input without rows, or of another dtype"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func"
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(each).tangent is not None
        for each in (input, weight, bias)
        if each is not None
    ):
        return "forward-mode derivatives"
    if torch._C._len_torch_function_stack() > 0 and any(
        not isinstance(mode, DeviceContext)
        for mode in _get_current_function_mode_stack()
    ):
        return "a TorchFunctionMode"
    return None


# -- taking over --------------------------------------------------------------------


def _fused_class(original: type) -> type:
    members = {"forward": _linear_forward, "__module__": original.__module__}
    return type(original.__name__, (original,), members)


_fused = ClassSwap(_fused_class)


def _take_over(module: nn.Module, weight: FusedWeight) -> None:
    module.__dict__[_WEIGHT] = weight
    if type(module).forward is not _linear_forward:
        _fused.apply(module)
