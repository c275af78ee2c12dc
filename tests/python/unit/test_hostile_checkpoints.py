"""A checkpoint for which nothing vouches, torch's own, with other bytes anywhere: it is
loaded, or one error says why not and nothing has changed."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import lowtide
from lowtide.saving import CheckpointError, manifest

TENSORS = "__0_0.distcp"


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [t.detach().clone() for t in (*model.parameters(), *states)]


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "it")
        model, optimizer = make()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optim": of_optimizer, "step": 3}
        dcp.save(state | {"more": {"a": [1, "x"], "b": {"c": 2.5}}}, checkpoint_id=path)
        yield path


def load(saved: Path, name: str, data: bytes) -> Any:
    """What is beside model and optimizer, or the error."""
    model, optimizer = make()
    before = state_of(model, optimizer)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "it")
        shutil.copytree(saved, path)
        (path / name).write_bytes(data)
        try:
            return lowtide.load(path, model, optimizer)
        except CheckpointError as error:
            refusal = error
    after = state_of(model, optimizer)
    assert all(map(torch.equal, before, after)) and len(before) == len(after)
    assert str(refusal).startswith("lowtide: load: ")
    return refusal


def test_it_loads_as_it_was_saved(saved: Path) -> None:
    found = load(saved, TENSORS, (saved / TENSORS).read_bytes())
    assert found == {"step": 3, "more": {"a": [1, "x"], "b": {"c": 2.5}}}


CHANGES = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.binary(max_size=3)
    ),
    min_size=1,
    max_size=4,
)


def changed(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    """Bytes taken out and put in, at shares of its length."""
    for share, removed, added in changes:
        at = int(share * len(data))
        data = data[:at] + added + data[at + removed :]
    return data


@pytest.mark.parametrize("name", [TENSORS, manifest.METADATA])
@given(changes=CHANGES)
@settings(max_examples=120)
def test_other_bytes_are_loaded_or_refused(
    saved: Path, name: str, changes: Any
) -> None:
    load(saved, name, changed((saved / name).read_bytes(), changes))


# -- metadata that is one, and lies ---------------------------------------------------

HUGE = torch.Size([1 << 50])


def huge(metadata: Any, name: str) -> None:
    known = metadata.state_dict_metadata[name]
    known.size = HUGE
    known.chunks[0].sizes = HUGE


LIES: dict[str, Any] = {
    "a state larger than all memory": lambda m: huge(m, "optim.state.weight.exp_avg"),
    "paths of no kind": lambda m: setattr(m, "planner_data", {"step": 7}),
    "paths into a tensor": lambda m: m.planner_data.update(
        {"step": ("more", "a", "k")}
    ),
    "paths of another thing": lambda m: m.planner_data.update({"step": ("more",)}),
    "indices far away": lambda m: m.planner_data.update({"step": ("x", 1 << 40)}),
    "no names": lambda m: setattr(m, "state_dict_metadata", None),
    "no places": lambda m: m.storage_data.clear(),
    "places out of the file": lambda m: [
        setattr(info, "offset", 1 << 60) for info in m.storage_data.values()
    ],
    "places of other kinds": lambda m: m.storage_data.update(
        dict.fromkeys(m.storage_data, "here")
    ),
    "places outside": lambda m: [
        setattr(info, "relative_path", "../it/" + info.relative_path)
        for info in m.storage_data.values()
    ],
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies_is_refused(saved: Path, lie: str) -> None:
    metadata = pickle.loads((saved / manifest.METADATA).read_bytes())
    LIES[lie](metadata)
    error = load(saved, manifest.METADATA, pickle.dumps(metadata))
    assert isinstance(error, CheckpointError), error
