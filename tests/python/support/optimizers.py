"""Optimizers of all kinds, and all that they and their models hold."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import lowtide
from support.model import ModelConfig
from support.saving import SMALL
from support.training import local

# torchao quantizes the states of shards with at least 4096 elements.
WIDE = ModelConfig(dim=64, num_layers=1, num_heads=2, kv_dim=2, ffn=256)

# Those of torch that work element by element, but for Rprop, which indexes: DTensors
# refuse that.
ELEMENTWISE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam amsgrad": lambda ps, **kw: torch.optim.Adam(ps, amsgrad=True, **kw),
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda ps, **kw: torch.optim.RMSprop(ps, momentum=0.5, **kw),
    "sgd": lambda ps, **kw: torch.optim.SGD(ps, 0.1, **kw),  # without states
    "sgd momentum": lambda ps, **kw: torch.optim.SGD(ps, 0.1, momentum=0.9, **kw),
}


def groups(model: Any) -> list[dict[str, Any]]:
    """Two, so that a fused step has a middle."""
    parameters = list(model.parameters())
    return [{"params": parameters[:5]}, {"params": parameters[5:], "lr": 3e-3}]


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(groups(model), lr=1e-2, **options)


def of_local_parameters(model: Any) -> torch.optim.Optimizer:
    parameters = lowtide.local_parameters(model)
    return torch.optim.AdamW(
        [{"params": parameters[:5]}, {"params": parameters[5:]}], lr=1e-2, fused=True
    )


def of_torchao(model: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=1e-2, block_size=8)


def of_transformers(model: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(lowtide.local_parameters(model), lr=1e-2, relative_step=False)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "one by one": adamw(foreach=False),
    "foreach": adamw(foreach=True),
    "amsgrad": adamw(foreach=True, amsgrad=True),
    "fused": adamw(fused=True),
    "local parameters": of_local_parameters,
    "momentum": lambda m: torch.optim.SGD(groups(m), lr=1e-2, momentum=0.9),
    "torchao": of_torchao,
    "torchao, compiled": of_torchao,
    "transformers": of_transformers,
}


def config_of(name: str) -> ModelConfig:
    return WIDE if name.startswith("torchao") else SMALL


@contextlib.contextmanager
def compiling(name: str, calls: list[None]) -> Iterator[None]:
    """torchao compiles the step of one parameter. Not compiled it can break in the
    middle of it; compiled it does between two, and the backend's kernels are no matter
    here: inductor's C++ compilers would take minutes. ``calls`` gets an item for each
    call of what was compiled."""

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        compiled = lookup_backend("aot_eager")(graph, inputs)

        def call(*arguments: Any) -> Any:
            calls.append(None)
            return compiled(*arguments)

        return call

    if name == "torchao":
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        compiles = functools.partial(torch.compile, backend=backend)
        with mock.patch("torch.compile", compiles):
            yield


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's: of the model, the generator and all that an optimizer knows."""
    found: dict[str, Any] = {"generator": torch.get_rng_state()}
    for name, buffer in model.named_buffers():
        found[name] = buffer.clone()
    for name, p in model.named_parameters():
        found[name] = p
        found[f"{name}.grad"] = p.grad
    for number, group in enumerate(optimizer.param_groups):
        for key in group.keys() - {"params"}:
            found[f"group {number}.{key}"] = torch.frombuffer(
                bytearray(repr(group[key]).encode()), dtype=torch.uint8
            )
        for i, p in enumerate(group["params"]):
            for key, value in optimizer.state.get(p, {}).items():
                found[f"state {number}.{i}.{key}"] = value
    return {name: plain(found[name]) for name in sorted(found)}


def plain(value: Any) -> torch.Tensor | None:
    """A copy of this rank's rows, of quantized ones as floats."""
    if not isinstance(value, torch.Tensor):
        return None if value is None else torch.as_tensor(value)
    value = local(value)
    if is_quantized(value):
        value = value.dequantize()
    return value.clone()


def is_quantized(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return is_traceable_wrapper_subclass(local(value))
