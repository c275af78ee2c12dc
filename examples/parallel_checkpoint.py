"""Checkpoints of llama_parallel.py with the names and whole shapes of llama.py's
parameters: they load on a mesh of any shape, and into a `Llama` of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from llama_parallel import ParallelLlama, origin_of


def save(
    model: ParallelLlama,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    directory: Path,
) -> None:
    """Every rank writes its own parts of parameters and moments."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    content = _whole(model_state, optimizer_state, mesh)
    dcp.save(content, checkpoint_id=directory)


def load(
    model: ParallelLlama,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    directory: Path,
) -> None:
    """Reads its own parts of what ranks of any mesh wrote."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # Into the bytes that the state dicts hold.
    dcp.load(_whole(model_state, optimizer_state, mesh), checkpoint_id=directory)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )


def _whole(
    model_state: dict[str, Any], optimizer_state: dict[str, Any], mesh: DeviceMesh
) -> dict[str, Any]:
    # A dim that both axes split is split over tp first.
    both = DeviceMesh.from_group(
        [mesh.get_group("tp"), mesh.get_group("dp")],
        mesh.device_type,
        mesh=mesh.mesh.t().contiguous(),
        mesh_dim_names=("tp", "dp"),
    )
    model, moments = {}, {}
    for name, value in model_state.items():
        origin, dim = origin_of(name)
        model[origin] = _over_both(value, dim, both)
    for name, values in optimizer_state["state"].items():
        origin, dim = origin_of(name)
        moments[origin] = {
            key: _over_both(value, dim, both) if isinstance(value, DTensor) else value
            for key, value in values.items()
        }
    return {"model": model, "optimizer": moments}


def _over_both(part: DTensor, dim: int | None, both: DeviceMesh) -> DTensor:
    """`part`, which dp shards, as what it is a part of along `dim`. The same bytes."""
    shape = list(part.shape)
    if dim is not None:
        shape[dim] *= both["tp"].size()
    return DTensor.from_local(
        part.to_local(),
        both,
        (Replicate() if dim is None else Shard(dim), Shard(0)),
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
