"""Parameters of tensor subclasses that say what is gathered for them, and what that
becomes: FSDP2's all-gather extensions, ``fsdp_pre_all_gather``,
``fsdp_post_all_gather`` and, from torch 2.15,
``fsdp_should_release_all_gather_outputs_after_post_all_gather``. The engine's side is
csrc/shard/parameters/all_gather_extension.h.
"""

import dataclasses
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lowtide._base.agreement import require_same_lines
from lowtide._sharding.parameter import UnitParameter
from lowtide._sharding.subclass import (
    POST,
    PRE,
    plain_gradient,
    releases,
    require_hooks,
    versions_of,
)


def _undisturbed(method: Callable[..., Any]) -> Callable[..., Any]:
    """What is made in an evaluation may be used in training."""

    def run(*args: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args)

    return run


class _Extended:
    """One parameter's way through a gather."""

    def __init__(self, parameter: UnitParameter, device: torch.device) -> None:
        self._device = device  # that hooks compute on
        # The reference is weak, as are all that the C++ unit holds: a parameter leads
        # to its modules.
        self._reference = weakref.ref(parameter)
        self.made = False
        self._num_arguments: int | None = None  # of the hook
        self.metadata: Any = None
        self.sizes: list[torch.Size] = []
        self.dtypes: list[torch.dtype] = []

    @property
    def parameter(self) -> UnitParameter:
        parameter = self._reference()
        assert parameter is not None
        return parameter

    @property
    def local(self) -> Tensor:
        shard = self.parameter.shard
        assert isinstance(shard, DTensor)
        return shard._local_tensor

    def _call(self, local: Tensor, hook: str, *args: Any, **kwargs: Any) -> Any:
        """An error of the hook is passed on as it is, and says whose it is."""
        try:
            return getattr(local, hook)(*args, **kwargs)
        except Exception as error:
            error.add_note(
                f"lowtide: {self.parameter.name}: expected "
                f"{type(self.local).__name__}.{hook} to return on every rank, got "
                f"this error (rank {dist.get_rank()} of {dist.get_world_size()}). "
                "The others wait for this rank's next collective until their "
                "group's timeout."
            )
            raise

    def inputs(self, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> list[Tensor]:
        parameter, local = self.parameter, self.local
        require_hooks(local, parameter.name)
        if self._num_arguments is None:
            self._num_arguments = _num_arguments(local, parameter.name)
        arguments = (
            mesh,
            parameter.sizes,
            make_contiguous_strides_for(parameter.sizes),
            parameter.slots[0][0],
            policy,
        )
        # A shard on the host has no bytes of lowtide's: the host waits for this copy.
        there = local if local.device == self._device else local.to(self._device)
        sent, self.metadata = self._call(there, PRE, *arguments[: self._num_arguments])
        if isinstance(sent, Tensor):
            sent = (sent,)
        sent = [_plain(tensor) for tensor in sent]
        for tensor in sent:
            tensor.data_ptr()  # of one that sleeps raises, before anything is sent
        dtypes = [tensor.dtype for tensor in sent]
        numels = [tensor.numel() for tensor in sent]
        if self.sizes and (dtypes, numels) != (
            self.dtypes,
            [size.numel() for size in self.sizes],
        ):
            raise ValueError(
                f"lowtide: {parameter.name}: expected {type(local).__name__}.{PRE} to "
                f"send the same every time, {_list(self.sizes, self.dtypes)}, got "
                f"{_list([t.shape for t in sent], dtypes)}. Shard it again if its "
                "layout has to change."
            )
        self.sizes = [tensor.shape for tensor in sent]
        self.dtypes = dtypes
        return sent

    def describe(self) -> str:
        pairs = zip(self.sizes, self.dtypes, strict=True)
        text = ", ".join(f"{size.numel()} elements {dtype}" for size, dtype in pairs)
        return f"parameter '{self.parameter.name}' sending {text or 'nothing'}"

    def arrived(
        self,
        gathered: list[Tensor],
        dtype: torch.dtype,
        world_size: int,
        in_order: bool,
    ) -> tuple[nn.Parameter, list[Tensor]] | None:
        """The full parameter and what else it is made of, the first time."""
        parameter = self.parameter
        if parameter.shard_dim != 0 and not in_order:
            for tensor in gathered:
                self._put_in_order(tensor, world_size)
        outputs = tuple(
            tensor.view(-1, *size[1:])
            for tensor, size in zip(gathered, self.sizes, strict=True)
        )
        if self.made:
            self._call(
                self.local, POST, outputs, self.metadata, dtype, out=parameter.full
            )
            return None
        full, inner = self._call(self.local, POST, outputs, self.metadata, dtype)
        full = torch.as_strided(
            full,
            parameter.sizes,
            make_contiguous_strides_for(parameter.sizes),
            storage_offset=0,
        )
        if full.dtype != dtype and parameter.shard.requires_grad:
            raise NotImplementedError(
                f"lowtide: {parameter.name}: expected {type(self.local).__name__}."
                f"{POST} to return a tensor of the param_dtype it is given, {dtype}, "
                f"got {full.dtype}. Convert it, or pass MixedPrecisionPolicy("
                f"param_dtype={full.dtype}) for its unit."
            )
        return parameter.full_over(full), list(inner)

    def _put_in_order(self, gathered: Tensor, world_size: int) -> None:
        """Moves the ranks' pieces, which came one after the other, to their places
        along another dimension than the first."""
        dim, size = self.parameter.shard_dim, self.local.shape
        if gathered.numel() != size.numel() * world_size:
            raise NotImplementedError(
                f"lowtide: {self.parameter.name}: expected {PRE} to send tensors of "
                f"the shard's size {tuple(size)} where dimension {dim} is split, got "
                f"{gathered.numel() // world_size} elements. Return Shard(0) for it "
                "from shard_placement_fn."
            )
        pieces = list(gathered.view(world_size, *size).clone())
        whole = [*size[:dim], size[dim] * world_size, *size[dim + 1 :]]
        with torch.autograd._unsafe_preserve_version_counter(gathered):
            torch.cat(pieces, dim=dim, out=gathered.view(whole))


@dataclasses.dataclass
class _Asked:
    """What a unit's hooks returned, and for which values."""

    sent: list[Tensor]
    versions: list[int]


class Extensions:
    """The extended parameters of one unit, in the order of its parameters."""

    def __init__(
        self,
        parameters: list[UnitParameter],
        dtypes: list[torch.dtype],
        mesh: DeviceMesh,
        policies: list[MixedPrecisionPolicy],
        keeps_parts: bool,
        device: torch.device,
    ) -> None:
        # Whether parts of what was gathered stay between forward and backward.
        self._keeps_parts = keeps_parts
        self._extended = [_Extended(each, device) for each in parameters]
        self._dtypes = dtypes
        self._mesh = _last_dimension(mesh)
        self._policies = policies
        self._agreed = False
        # When the ranks agreed: what units send that have not been gathered since.
        self._asked: dict[Extensions, _Asked] = {}

    @property
    def calls(
        self,
    ) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """What the C++ unit calls, also in a compiled forward: Dynamo would go on with
        the frames below it and trace the hooks."""
        return (
            torch.compiler.disable(self.inputs),
            torch.compiler.disable(self.arrived),
            torch.compiler.disable(self.passing),
        )

    @_undisturbed
    def inputs(self) -> list[Tensor]:
        if not self._agreed:  # the unit is gathered before the first forward
            agree([self])
        asked = self._asked.pop(self, None)
        if asked is None:
            self._asked.clear()  # of units that the first forward left out
        elif asked.versions == self._versions():
            return asked.sent
        return self._ask()

    @_undisturbed
    def _ask(self) -> list[Tensor]:
        return [
            tensor
            for extended, policy in zip(self._extended, self._policies, strict=True)
            for tensor in extended.inputs(self._mesh, policy)
        ]

    def _versions(self) -> list[int]:
        return [v for extended in self._extended for v in versions_of(extended.local)]

    @_undisturbed
    def passing(self) -> list[bool]:
        """Whether the bytes of what `inputs` sends go when the parameters have been
        made, in its order."""
        return [
            not self._keeps_parts and releases(extended.local, extended.parameter.name)
            for extended in self._extended
            for _ in extended.sizes
        ]

    @_undisturbed
    def arrived(
        self, gathered: list[Tensor], from_parts: bool
    ) -> tuple[list[nn.Parameter], list[Tensor]]:
        made: list[tuple[_Extended, nn.Parameter]] = []
        inner: list[Tensor] = []
        place = 0
        for extended, dtype in zip(self._extended, self._dtypes, strict=True):
            end = place + len(extended.sizes)
            new = extended.arrived(
                gathered[place:end], dtype, self._mesh.size(), from_parts
            )
            place = end
            if new is not None:
                made.append((extended, new[0]))
                inner += new[1]
        for extended, full in made:
            extended.parameter.full = full
            extended.made = True
        return [full for _, full in made], inner


def agree(units: list[Extensions]) -> None:
    """Compares what is sent over the units' ranks before any of it is gathered: what
    does not fit together would be exchanged between other places, or wait for ever.
    What the hooks return is kept for the units' first gathers: FSDP2 asks them once for
    each."""
    failure: Exception | None = None
    asked: dict[Extensions, _Asked] = {}
    by_group: dict[str, tuple[DeviceMesh, list[str]]] = {}
    for unit in units:
        try:
            if not unit._agreed:
                sent = unit._ask()
                asked[unit] = _Asked(sent, unit._versions())
            lines = [each.describe() for each in unit._extended]
        except Exception as error:
            failure = failure or error
            lines = [f"{type(error).__name__}: {error}"]
        name = unit._mesh.get_group().group_name
        by_group.setdefault(name, (unit._mesh, []))[1].extend(lines)
    for mesh, lines in by_group.values():
        require_same_lines(
            mesh.get_group(),
            torch.device(mesh.device_type),
            lines,
            who=PRE,
            expected="as many elements",
            advice="Pad what it returns to ceil(outer_size[0] / ranks) rows.",
        )
    if failure is not None:
        raise failure
    for unit in asked:
        unit._agreed, unit._asked = True, asked


def _plain(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor:
        return tensor.contiguous()
    return plain_gradient(tensor.detach())


def _num_arguments(local: Tensor, who: str) -> int:
    """All five that FSDP2 gives, or the mesh, as it first did."""
    signature = inspect.signature(getattr(local, PRE))
    if len(signature.parameters) not in (1, 5):
        raise ValueError(
            f"lowtide: {who}: expected {type(local).__name__}.{PRE} to take (mesh, "
            "outer_size, outer_stride, module, mp_policy), or the mesh alone, got "
            f"{signature}. Change its signature."
        )
    return len(signature.parameters)


def _list(sizes: list[torch.Size], dtypes: list[torch.dtype]) -> str:
    pairs = zip(sizes, dtypes, strict=True)
    return ", ".join(f"{tuple(size)} {dtype}" for size, dtype in pairs) or "nothing"


def _last_dimension(mesh: DeviceMesh) -> DeviceMesh:
    """The dimension that the unit is sharded over."""
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[-1]]
    return DeviceMesh.from_group(mesh.get_group(-1), mesh.device_type)
