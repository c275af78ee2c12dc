"""``cuda`` stands for the phantom device: programs written for a GPU run unchanged.

What a program may notice: ``tensor.device.type`` is ``"phantom"``, and there is one
device whatever index is asked for.
"""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lowtide.phantom import alloc_conf, device_module
from lowtide.phantom.allocator import AllocatorModel
from lowtide.planning import finiteness
from lowtide.planning.decisions import Decisions

_Device = torch.device
_Generator = torch.Generator
_IS_CUDA = torch.Tensor.is_cuda.__get__


def set_up(
    *, num_devices: int, memory: int | None, decisions: Decisions, notes: list[str]
) -> None:
    """For the rest of the process, after :func:`lowtide.phantom.install`. What is
    ignored is said in ``notes``, each thing once."""
    put(torch, "device", _DeviceType("device", (), {}))
    put(torch, "Generator", _GeneratorType("Generator", (), {}))
    _CudaIsPhantom(decisions).__enter__()
    _replace_threads(decisions)
    _replace_cuda_module(num_devices, memory, notes)
    _replace_amp()
    _replace_compile(notes)
    torch.serialization.register_package(15, lambda storage: None, _restored)


def put(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


# -- devices -------------------------------------------------------------------------


def phantom_of(value: Any) -> Any:
    """``value``, or the phantom device if it names a CUDA device."""
    if isinstance(value, str):
        return "phantom" if _is_cuda(value) else value
    if type(value) is _Device and value.type in ("cuda", "phantom"):
        return _Device("phantom", 0) if value.type == "cuda" or value.index else value
    return value


def _is_cuda(name: str) -> bool:
    return name == "cuda" or name.startswith("cuda:")


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


class _GeneratorType(type):
    """Makes generators like ``torch.Generator``."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _Generator(torch.device(device))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Generator)


class _CudaIsPhantom(TorchFunctionMode):
    """Maps devices among the arguments of torch's functions and tensor methods, and
    follows what is known of the values. Of one thread."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self._decisions = decisions

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to("phantom", **_only(kwargs, "non_blocking"))
        if func == _IS_CUDA:
            return args[0].device.type == "phantom"
        args = tuple(phantom_of(a) for a in args)
        kwargs = {name: phantom_of(v) for name, v in (kwargs or {}).items()}
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "phantom", *args[2:])
        if type(kwargs.get("device")) is int:  # an index, of a rank's own device
            kwargs["device"] = "phantom"
        result = func(*args, **kwargs)
        self._decisions.notice(func, args, result)
        return finiteness.follow(func, args, kwargs, result)


def _only(kwargs: dict[str, Any] | None, *names: str) -> dict[str, Any]:
    return {name: v for name, v in (kwargs or {}).items() if name in names}


def _replace_threads(decisions: Decisions) -> None:
    start = threading.Thread.start

    def start_on_phantom(self: threading.Thread) -> None:
        run = self.run

        def run_on_phantom() -> None:
            with _CudaIsPhantom(decisions):
                run()

        put(self, "run", run_on_phantom)
        start(self)

    put(threading.Thread, "start", start_on_phantom)


def _restored(storage: Any, location: str) -> Any:
    """Of torch.load: what was saved on a GPU, or is asked for on one."""
    return storage.to(device=_Device("phantom", 0)) if _is_cuda(location) else None


# -- torch.cuda ----------------------------------------------------------------------


def _replace_cuda_module(
    num_devices: int, memory: int | None, notes: list[str]
) -> None:
    total = memory or 80 << 30

    def skip_fraction(fraction: float, device: Any = None) -> None:
        notes.append(
            f"set_per_process_memory_fraction({fraction}) was skipped: pass that share "
            "as --device-memory"
        )

    properties = types.SimpleNamespace(
        name="lowtide phantom",
        major=9,
        minor=0,
        total_memory=total,
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        L2_cache_size=50 << 20,
        gcnArchName="",
    )
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
        "device_count": lambda: num_devices,
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
        "set_per_process_memory_fraction": skip_fraction,
    }
    for name, value in ours.items():
        stand_in = _for_any_device(name, value)
        setattr(torch.cuda, name, stand_in)
        if hasattr(torch.cuda.memory, name):
            setattr(torch.cuda.memory, name, stand_in)
    put(torch.cuda.memory, "_record_memory_history", lambda *args, **kwargs: None)
    put(torch.cuda.memory, "_set_allocator_settings", _set_allocator)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args: 0)
    put(torch.nn.Module, "cuda", lambda self, device=None: self.to("phantom"))


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


def _set_allocator(conf: str) -> None:
    settings = alloc_conf.parse(conf)
    if settings.keys() != {"expandable"}:
        raise ValueError(
            "lowtide: plan: expected a program that switches expandable_segments alone "
            f"while it runs, got {conf!r}. Pass --allocator {conf} and leave it out."
        )
    AllocatorModel.of_device().set_expandable(settings["expandable"])


# -- autocast ------------------------------------------------------------------------


def _replace_amp() -> None:
    map_first_argument(torch.amp.autocast_mode.autocast, "__init__", "device_type")
    map_first_argument(torch.amp.grad_scaler.GradScaler, "__init__", "device")
    for name in ("get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        map_function(torch, name)
    is_enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    put(
        torch,
        "is_autocast_enabled",
        lambda device_type="cuda": is_enabled(phantom_of(device_type)),
    )
    put(torch, "get_autocast_gpu_dtype", lambda: dtype("cuda"))

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        sum(found.item() for found in state["found_inf_per_device"].values())
        return optimizer.step(*args, **kwargs)  # no value says that it overflowed

    put(torch.amp.grad_scaler.GradScaler, "_maybe_opt_step", step)


def map_first_argument(owner: Any, name: str, keyword: str) -> None:
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


def map_function(owner: Any, name: str) -> None:
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        args = tuple(phantom_of(a) for a in args)
        return function(*args, **{k: phantom_of(v) for k, v in kwargs.items()})

    setattr(owner, name, mapped)


# -- torch.compile -------------------------------------------------------------------


def _replace_compile(notes: list[str]) -> None:
    note = "torch.compile was skipped: the figures are those of eager mode"

    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if note not in notes:
            notes.append(note)
        if isinstance(model, torch.nn.Module):
            model.__dict__["_orig_mod"] = model  # what programs save
        return (lambda inner: inner) if model is None else model

    put(torch, "compile", compile)
    put(torch.nn.Module, "compile", lambda self, *args, **kwargs: compile())
