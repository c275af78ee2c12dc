"""The ranks of a planned program: one that runs, others that only seem to.

What other ranks would send does not exist. Tensors are left as they are, and objects
are those of the rank that runs.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._C._distributed_c10d import GradBucket
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import distributed

from lowtide.phantom import init_world
from lowtide.planning.cuda import map_first_argument, map_function, put

_RANKS_PER_NODE = 8
# What torchrun sets.
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


def ranks_of_a_node(world: int) -> int:
    return min(world, _RANKS_PER_NODE)


def set_up(*, world: int, rank: int, torchrun: bool, notes: list[str]) -> None:
    """For the rest of the process. ``torchrun``: the environment is what it would be
    under torchrun. What is skipped is said in ``notes``, each thing once."""
    if torchrun:
        os.environ.update(_environment(world, rank))
    _replace_groups(world, rank)
    _replace_objects()
    _replace_spawn(world, rank)
    _replace_ddp(notes)
    _replace_checkpoints(notes)


def _environment(world: int, rank: int) -> dict[str, str]:
    local, node = rank % _RANKS_PER_NODE, rank // _RANKS_PER_NODE
    num_nodes = -(-world // _RANKS_PER_NODE)
    values = (
        *(rank, world, local, ranks_of_a_node(world), node),
        *(num_nodes, rank, world, "127.0.0.1", 29500),
    )
    return dict(zip(VARIABLES, map(str, values), strict=True))


def _replace_groups(world: int, rank: int) -> None:
    torchs = dist.init_process_group

    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank_: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        given = kwargs.get("rank", rank_)
        if world_size not in (-1, world) or given not in (-1, rank):
            raise ValueError(
                "lowtide: plan: expected init_process_group without a rank and size, "
                f"or for rank {rank} of {world}, got rank {given} of {world_size}. "
                f"Pass --world {max(world_size, 1)} --rank {max(given, 0)}."
            )
        put(dist, "init_process_group", torchs)  # what init_world calls
        try:
            init_world(world, rank)
        finally:
            put(dist, "init_process_group", init_process_group)

    new_group = dist.new_group

    def group_of_one_backend(*args: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("backend", "device_id")}
        return new_group(*args[:2], **kwargs)

    for module in (dist, distributed_c10d, device_mesh):
        put(module, "init_process_group", init_process_group)
        put(module, "new_group", group_of_one_backend)
    for module in (dist, distributed_c10d):
        module.is_nccl_available = lambda: True
    map_first_argument(device_mesh.DeviceMesh, "__init__", "device_type")
    map_function(device_mesh, "init_device_mesh")
    dist.init_device_mesh = device_mesh.init_device_mesh


# -- objects -------------------------------------------------------------------------


def _replace_objects() -> None:
    """torch sends pickled objects as tensors, whose bytes nobody has."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(
        obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any
    ) -> None:
        if object_gather_list is not None:
            all_gather_object(object_gather_list, obj)

    def broadcast_object_list(object_list: list[Any], *_: Any, **__: Any) -> None:
        pass

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Sequence[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        if scatter_object_input_list is not None:
            rank = dist.get_rank(group)
            scatter_object_output_list[0] = scatter_object_input_list[rank]

    for function in (
        all_gather_object,
        gather_object,
        broadcast_object_list,
        scatter_object_list,
    ):
        for module in (dist, distributed_c10d):
            setattr(module, function.__name__, function)


# -- torch.multiprocessing.spawn -----------------------------------------------------


def _replace_spawn(world: int, rank: int) -> None:
    def spawn(
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        *_: Any,
        **__: Any,
    ) -> None:
        if nprocs != ranks_of_a_node(world):
            raise ValueError(
                "lowtide: plan: expected torch.multiprocessing.spawn of the ranks of a "
                f"node, {ranks_of_a_node(world)}, got {nprocs}. Pass --world {nprocs}."
            )
        fn(rank % _RANKS_PER_NODE, *args)

    put(torch.multiprocessing, "spawn", spawn)


# -- checkpoints ---------------------------------------------------------------------


def _replace_checkpoints(notes: list[str]) -> None:
    """Ranks agree on who writes what. Everything before that, such as gathering a full
    state dict, runs."""
    for module, name, done in (
        (dcp.state_dict_saver, "_save_state_dict", "nothing was written"),
        (dcp.state_dict_loader, "_load_state_dict", "nothing was read"),
    ):
        public = f"torch.distributed.checkpoint.{name.split('_')[1]}"
        note = f"{public} was skipped: {done}"

        def skipped(*args: Any, _note: str = note, **kwargs: Any) -> Any:
            if _note not in notes:
                notes.append(_note)
            return dcp.metadata.Metadata({})

        setattr(module, name, skipped)


# -- DDP -----------------------------------------------------------------------------


def _replace_ddp(notes: list[str]) -> None:
    """What reads back what other ranks sent: shapes, the order of gradients, and the
    results of an all-reduce, which the fake group's futures do not have."""
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

    put(ddp, "__init__", construct_with_hook)
    put(ddp, "register_comm_hook", ignore_hook)
    distributed._verify_param_shape_across_processes = lambda *args, **kwargs: None
    put(dist.Reducer, "_rebuild_buckets", keep_buckets)
