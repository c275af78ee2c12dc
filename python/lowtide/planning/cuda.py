"""``cuda`` stands for the phantom device: programs written for a GPU run unchanged.

What a program may notice: ``tensor.device.type`` is ``"phantom"``, and there is one
device whatever index is asked for.
"""

import functools
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.overrides import TorchFunctionMode

from lowtide.phantom import device_module, init_world
from lowtide.planning import finiteness

_RANKS_PER_NODE = 8
_Device = torch.device


def set_up(*, world: int, rank: int, memory: int | None, notes: list[str]) -> None:
    """For the rest of the process, after :func:`lowtide.phantom.install`. What is
    ignored is said in ``notes``, each thing once."""
    local = rank % _RANKS_PER_NODE
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE=str(min(world, _RANKS_PER_NODE)),
        GROUP_RANK=str(rank // _RANKS_PER_NODE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    _put(torch, "device", _DeviceType("device", (), {}))
    _CudaIsPhantom().__enter__()
    _replace_cuda_module(memory)
    _replace_amp()
    _replace_distributed(world, rank)
    _replace_ddp(notes)
    _replace_compile(notes)


def _put(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


# -- devices -------------------------------------------------------------------------


def phantom_of(value: Any) -> Any:
    """``value``, or the phantom device if it names a CUDA device."""
    if isinstance(value, str):
        is_cuda = value == "cuda" or value.startswith("cuda:")
        return "phantom" if is_cuda else value
    if type(value) is _Device and value.type == "cuda":
        return _Device("phantom", 0)
    return value


class _DeviceType(type):
    """Makes devices like ``torch.device``, which is no class to inherit from."""

    def __call__(cls, *args: Any, **kwargs: Any) -> _Device:
        args = tuple(phantom_of(a) for a in args)
        kwargs = {name: phantom_of(v) for name, v in kwargs.items()}
        made = _Device(*args, **kwargs)
        if made.type == "phantom" and made.index:
            return _Device("phantom", 0)
        return made

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Device)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Device)


class _CudaIsPhantom(TorchFunctionMode):
    """Maps devices among the arguments of torch's functions and tensor methods, and
    follows what is known of the values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to("phantom", **_only(kwargs, "non_blocking"))
        if func is torch.Tensor.is_cuda.__get__:
            return args[0].device.type == "phantom"
        args = tuple(phantom_of(a) for a in args)
        kwargs = {name: phantom_of(v) for name, v in (kwargs or {}).items()}
        return finiteness.follow(func, args, kwargs, func(*args, **kwargs))


def _only(kwargs: dict[str, Any] | None, *names: str) -> dict[str, Any]:
    return {name: v for name, v in (kwargs or {}).items() if name in names}


# -- torch.cuda ----------------------------------------------------------------------


def _replace_cuda_module(memory: int | None) -> None:
    total = memory or 80 << 30
    properties = types.SimpleNamespace(
        name="lowtide phantom",
        major=9,
        minor=0,
        total_memory=total,
        multi_processor_count=132,
        gcnArchName="",
    )
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    ours: dict[str, Any] = {
        name: getattr(device_module, name)
        for name in dir(device_module)
        if hasattr(torch.cuda, name) and not name.startswith("__")
    }
    for name in ("Any", "TracebackType", "contextlib", "torch", "accelerator"):
        ours.pop(name, None)
    ours |= {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: local_world,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": _AnyDevice,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (
            max(total - torch.accelerator.memory_reserved(), 0),
            total,
        ),
        "stream": lambda stream: device_module.stream(stream),
        "is_current_stream_capturing": lambda: False,
        "ipc_collect": lambda: None,
    }
    for name, value in ours.items():
        setattr(torch.cuda, name, _for_any_device(name, value))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(torch.cuda.memory, name, getattr(torch.cuda, name))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args: 0)
    _put(torch.nn.Module, "cuda", lambda self, device=None: self.to("phantom"))


_ONE_DEVICE = {
    *("memory_allocated", "max_memory_allocated", "memory_reserved"),
    *("max_memory_reserved", "memory_stats", "reset_peak_memory_stats"),
    *("reset_accumulated_memory_stats", "synchronize", "current_stream"),
    *("default_stream", "manual_seed_all"),
}


def _for_any_device(name: str, function: Any) -> Any:
    """Drops a device index: there is one device."""
    if name not in _ONE_DEVICE or name == "manual_seed_all":
        return function

    @functools.wraps(function)
    def call(device: Any = None) -> Any:
        return function()

    return call


class _AnyDevice(device_module.device):
    def __init__(self, device: Any) -> None:
        super().__init__(None)


# -- autocast ------------------------------------------------------------------------


def _replace_amp() -> None:
    _map_first_argument(torch.amp.autocast_mode.autocast, "__init__", "device_type")
    _map_first_argument(torch.amp.grad_scaler.GradScaler, "__init__", "device")
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled"):
        _map_function(torch, name)

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        sum(found.item() for found in state["found_inf_per_device"].values())
        return optimizer.step(*args, **kwargs)  # no value says that it overflowed

    _put(torch.amp.grad_scaler.GradScaler, "_maybe_opt_step", step)


def _map_first_argument(owner: Any, name: str, keyword: str) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def mapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (phantom_of(args[0]), *args[1:])
        if keyword in kwargs:
            kwargs[keyword] = phantom_of(kwargs[keyword])
        elif not args and keyword == "device":  # GradScaler's default is cuda
            kwargs[keyword] = "phantom"
        return function(self, *args, **kwargs)

    setattr(owner, name, mapped)


def _map_function(owner: Any, name: str) -> None:
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        args = tuple(phantom_of(a) for a in args)
        return function(*args, **{k: phantom_of(v) for k, v in kwargs.items()})

    setattr(owner, name, mapped)


# -- torch.distributed ---------------------------------------------------------------


def _replace_distributed(world: int, rank: int) -> None:
    torchs = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        dist.init_process_group = torchs  # what init_world calls
        try:
            init_world(world, rank)
        finally:
            dist.init_process_group = init_process_group

    new_group = dist.new_group

    def group_of_one_backend(*args: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("backend", "device_id")}
        return new_group(*args[:2], **kwargs)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group
        module.new_group = group_of_one_backend
        module.is_nccl_available = lambda: True
    from torch.distributed import device_mesh

    _map_first_argument(device_mesh.DeviceMesh, "__init__", "device_type")
    _map_function(device_mesh, "init_device_mesh")
    dist.init_device_mesh = device_mesh.init_device_mesh


def _replace_ddp(notes: list[str]) -> None:
    """What reads back what other ranks sent: shapes, the order of gradients, and the
    results of an all-reduce, which the fake group's futures do not have."""
    from torch.nn.parallel import distributed

    note = "DDP keeps its first bucket instead of cutting it into smaller ones"
    ddp = distributed.DistributedDataParallel
    construct, register = ddp.__init__, ddp.register_comm_hook

    def reduced(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    @functools.wraps(construct)
    def construct_with_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        register(self, None, reduced)

    def ignore_hook(self: Any, state: object, hook: Any) -> None:
        notes.append(f"DDP's communication hook {hook.__qualname__} was skipped")

    def keep_buckets(self: Any) -> bool:
        if note not in notes:
            notes.append(note)
        return False

    _put(ddp, "__init__", construct_with_hook)
    _put(ddp, "register_comm_hook", ignore_hook)
    distributed._verify_param_shape_across_processes = lambda *args, **kwargs: None
    _put(dist.Reducer, "_rebuild_buckets", keep_buckets)


def _replace_compile(notes: list[str]) -> None:
    note = "torch.compile was skipped: the figures are those of eager mode"

    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if note not in notes:
            notes.append(note)
        return (lambda inner: inner) if model is None else model

    _put(torch, "compile", compile)
    _put(torch.nn.Module, "compile", lambda self, *args, **kwargs: compile())
