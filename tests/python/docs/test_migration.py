"""The migration pages name every argument and method there is, and their programs
run."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    _fully_shard,
)
from torch.distributed.fsdp import fully_shard as fsdp2

import lowtide
from lowtide._torch_version import VERSION
from support.ranks import RankPool

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("fsdp2", "fsdp1", "zero3")


def page(name: str) -> str:
    return (DOCS / f"migration_from_{name}.md").read_text()


def first_column(text: str, heading: str) -> list[str]:
    """Code in the first column of the table under `heading`."""
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [re.findall(r"`([^`]+)`", row.split("|")[1])[0] for row in rows]


# From which version on torch has them.
ARGUMENTS_SINCE = {"dp_mesh_dims": (2, 12)}
METHODS_SINCE = {
    "set_symm_mem_for_comm": (2, 12),
    "reset_iter_state": (2, 13),
    "set_reduce_scatter_unused_params": (2, 13),
    "set_reduce_scatter_max_input_buffers": (2, 13),
    "set_separate_reduce_scatter_group": (2, 13),
    "set_keep_unsharded_storage": (2, 15),
    "set_manual_backward_finalization": (2, 15),
    "finalize_backward": (2, 15),
}


def of_this_torch(rows: list[str], since: dict[str, tuple[int, int]]) -> list[str]:
    return [row for row in rows if VERSION >= since.get(row, (2, 11))]


@pytest.mark.parametrize(("name", "version"), (ARGUMENTS_SINCE | METHODS_SINCE).items())
def test_row_of_what_a_later_torch_has_says_since_when(name, version):
    assert f"\n| `{name}` | of torch {version[0]}.{version[1]}" in page("fsdp2")


def test_every_argument_of_fully_shard_has_a_row():
    rows = first_column(page("fsdp2"), "`fully_shard`")
    assert rows == list(inspect.signature(lowtide.fully_shard).parameters)
    theirs = [*inspect.signature(fsdp2).parameters, "grads"]
    assert of_this_torch(rows, ARGUMENTS_SINCE) == theirs


def test_every_method_of_a_sharded_module_has_a_row():
    methods = [name for name in vars(FSDPModule) if not name.startswith("_")]
    rows = first_column(page("fsdp2"), "Methods of a sharded module")
    assert of_this_torch(rows, METHODS_SINCE) == methods
    assert set(methods) <= set(vars(lowtide.FSDPModule))


def taken(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in parameters]


@pytest.mark.parametrize(
    "name", [name for name in vars(FSDPModule) if not name.startswith("_")]
)
def test_method_takes_what_this_torchs_takes(name):
    """And beyond that, on an older torch, what may be left out."""
    theirs, ours = (taken(vars(c)[name]) for c in (FSDPModule, lowtide.FSDPModule))
    assert ours[: len(theirs)] == theirs
    beyond = ours[len(theirs) :]
    assert all(default is not inspect.Parameter.empty for *_, default in beyond)


def test_fully_shard_takes_what_this_torchs_takes():
    theirs, ours = (
        taken(fsdp2),
        dict((one[0], one) for one in taken(lowtide.fully_shard)),
    )
    # FSDP2's OffloadPolicy() is none.
    assert [ours[one[0]] for one in theirs if one[0] != "offload_policy"] == [
        one for one in theirs if one[0] != "offload_policy"
    ]


def test_policies_are_torchs_and_have_the_fields_that_are_followed():
    precision = ["param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"]
    override = ["param_dtype_override_fn"]  # torch's has it from 2.15 on
    for name, fields, is_torchs in (
        ("MixedPrecisionPolicy", precision + override, VERSION >= (2, 15)),
        ("OffloadPolicy", [], True),
        ("CPUOffloadPolicy", ["pin_memory"], True),
    ):
        policy, theirs = getattr(lowtide, name), getattr(_fully_shard, name)
        assert policy is theirs if is_torchs else issubclass(policy, theirs)
        assert [field.name for field in dataclasses.fields(policy)] == fields


def test_every_argument_of_fsdp1_has_a_row():
    parameters = inspect.signature(FullyShardedDataParallel.__init__).parameters
    rows = first_column(page("fsdp1"), "Arguments of `FullyShardedDataParallel`")
    assert rows == [name for name in parameters if name != "self"]


def test_every_name_of_our_own_is_listed():
    listed = page("fsdp2").split("lowtide's own are ")[1].split("; and")[0]
    later = {"DataParallelMeshDims", "ShardPlacementResult", "GradientReductionHandle"}
    theirs = {*_fully_shard.__all__} | later
    ours = {
        name
        for name in lowtide.__all__
        if name not in theirs
        and not isinstance(getattr(lowtide, name), types.ModuleType)
    }
    assert set(re.findall(r"`(\w+)`", listed)) == ours


@pytest.mark.parametrize("name", PAGES)
def test_names_of_lowtide_exist(name):
    named = set(re.findall(r"lowtide\.(\w+)", page(name)))
    modules = {module.name for module in pkgutil.iter_modules(lowtide.__path__)}
    assert named and named <= set(dir(lowtide)) | modules
    called = set(re.findall(r"\bset_\w+", page(name))) - set(METHODS_SINCE)
    known = {m for m in dir(lowtide.FSDPModule) if m.startswith("set_")}
    elsewhere = {"set_state_dict", "set_model_state_dict", "set_z3_leaf_modules"}
    assert called <= known | elsewhere


def run_program(program: str) -> None:
    exec(compile(program, "page", "exec"), {"torch": torch})


@pytest.mark.parametrize("name", ["fsdp1", "zero3"])
def test_program_runs(name):
    (program,) = re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)
    with RankPool(2) as pool:
        pool.run(run_program, program)
