"""One rank of a world, in a process with the dry driver.

Alone, its store answers at once, gloo's groups are torch's ``fake`` ones, and of
objects that ranks exchange every rank has this one's. Beside processes of all other
ranks the store, gloo and objects are real. NCCL is the dry driver's and sends nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed import distributed_c10d

from . import calls, groups, objects, values
from .stores import LoneStore, SharedStore

_RANKS_OF_MACHINE = 8


def install(world: int, rank: int, port: int | None = None) -> None:
    """For the rest of the process: rendezvous of any kind gives ``rank`` of
    ``world``. The other ranks are not there, or with ``port``, of a
    :class:`.stores.Meeting`, in processes beside this one."""
    shared = None if port is None else SharedStore.connect(port)
    store = shared or LoneStore(world)

    def meet(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        _require_same(url, world, rank)
        yield store, rank, world

    # A function of the same name hides the module.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    for scheme in handlers:
        handlers[scheme] = meet
    groups.install()
    calls.install()
    objects.install(shared)
    if shared is None:
        replace_gloo()
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _replace_spawn(world, rank)
    _replace_checkpoints()


def _require_same(url: str, world: int, rank: int) -> None:
    """torch puts what init_process_group was given into the address."""
    given = {k: int(v[0]) for k, v in parse_qs(urlparse(url).query).items()}
    asked = given.get("rank", rank), given.get("world_size", world)
    if asked != (rank, world):
        raise ValueError(
            "lowtide: phantom: expected init_process_group without a rank and size, or "
            f"for rank {rank} of {world}, got rank {asked[0]} of {asked[1]}. Pass "
            f"--world {asked[1]} --rank {asked[0]}."
        )


def replace_gloo() -> None:
    """Its groups would wait for the others; torch's ``fake`` ones stand for them under
    gloo's name."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers
    backend: Any = distributed_c10d.Backend
    config: Any = distributed_c10d.BackendConfig
    config(backend.GLOO)  # from torch 2.14 on this registers it, with its type
    backend.backend_type_map[backend.GLOO] = dist.ProcessGroup.BackendType.CUSTOM
    asked = config.get_device_backend_map

    def without_gloo(self: Any) -> dict[str, str]:
        return {
            device: backend.FAKE if name == backend.GLOO else name
            for device, name in asked(self).items()
        }

    config.get_device_backend_map = without_gloo
    # Which gloo alone has.
    watched: Any = distributed_c10d
    watched.monitored_barrier = dist.monitored_barrier = _watched_barrier


def _watched_barrier(group: Any = None, *_: Any, **__: Any) -> None:
    dist.barrier(group)


def _replace_spawn(world: int, rank: int) -> None:
    """What a program starts of its machine's ranks is this one, here."""
    of_machine = min(world, _RANKS_OF_MACHINE)

    def spawn(
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        *_: Any,
        **__: Any,
    ) -> None:
        if nprocs != of_machine:
            raise ValueError(
                "lowtide: phantom: expected torch.multiprocessing.spawn of the ranks "
                f"of a machine, {of_machine}, got {nprocs}. Pass --world {nprocs}."
            )
        fn(rank % of_machine, *args)

    torch.multiprocessing.spawn = spawn


def _replace_checkpoints() -> None:
    """Ranks agree on who writes what; and values that nobody computed must not be taken
    for a checkpoint. Everything before that, such as gathering a full state dict,
    runs."""
    for module, name, done in (
        (dcp.state_dict_saver, "_save_state_dict", "nothing was written"),
        (dcp.state_dict_loader, "_load_state_dict", "nothing was read"),
    ):
        public = f"torch.distributed.checkpoint.{name.split('_')[1]}"

        def skipped(
            *_: Any, _what: str = f"{public} was skipped: {done}", **__: Any
        ) -> Any:
            values.notes[_what, values.where()] += 1
            return dcp.metadata.Metadata({})

        setattr(module, name, skipped)
