"""A 4 x 2 mesh of a fake group, operators and functions with and without rules, and
the messages of what fails."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lowtide import spmd

RANK = "(rank 3 of 8)"
_FILES = [Path(__file__), *Path(__file__).parents[1].joinpath("spmd").glob("*.py")]
_LINES = re.compile(f"({'|'.join(re.escape(os.path.relpath(f)) for f in _FILES)}):\\d+")


@cache
def library_of(namespace: str) -> torch.library.Library:
    """Kept: where torch.ops has an operator of a library that is gone, torch finds no
    decompositions for any, and compiles nothing."""
    return torch.library.Library(namespace, "DEF")


@contextmanager
def fake_mesh() -> Iterator[DeviceMesh]:
    """Rank 3 of 8, on ("data", "model"); collectives return what they were given."""
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "model"))
    finally:
        dist.destroy_process_group()


def leaf(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True, **options)


def inside(
    body: Callable[..., Any], *tensors: torch.Tensor, **declared: Any
) -> tuple[Any, Any]:
    """What a region of this body returns, and its run."""
    with spmd.region("body", **declared) as run:
        result = run.outputs(body(*run.inputs(*tensors)))
    return result, run


def function(
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], torch.Tensor],
) -> type[torch.autograd.Function]:
    """An autograd function of one tensor, new each time."""

    class HandWritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return forward(x.detach())

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return backward(gradient)

    return HandWritten


def reduced(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=group)
    return tensor


def message(call: Callable[[], Any], kind: type[Exception]) -> str:
    """What it raises; HERE stands for lines of the tests, which move."""
    with pytest.raises(kind) as raised:
        call()
    return _LINES.sub("HERE", str(raised.value))


def failure(call: Callable[[], Any]) -> str:
    return message(call, spmd.ReplicationError)
