"""A checkpoint that is not what was saved is refused before anything changes: one
error, on every rank, that names the file and the tensor."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import lowtide
from lowtide.saving import CheckpointError, checksums, manifest
from support.bits import assert_same_tensors
from support.model import ModelConfig
from support.saving import SMALL, make, save_after, shards, train


def refused(path: Path, **settings: Any) -> str:
    """The error; the model and the optimizer, which have state, are as they were."""
    model, optimizer = make(1, **settings)
    config = settings.get("config", SMALL)
    train(model, optimizer, range(1), config)
    before = shards(model, optimizer)
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(CheckpointError) as raised:
        lowtide.load(path, model, optimizer)
    assert_same_tensors(shards(model, optimizer), before, "untouched")
    assert [dict(group) for group in optimizer.param_groups] == groups
    train(model, optimizer, range(1, 2), config)  # as if nothing had been
    return str(raised.value)


def items_of(path: Path, file: str) -> list[list[Any]]:
    return json.loads((path / manifest.FILE_NAME).read_text())["files"][file]["items"]


def first_tensor(path: Path) -> tuple[str, int, int]:
    """Of which every rank has rows."""
    name, begin, length, _ = next(
        item
        for item in items_of(path, "__1_0.distcp")
        if item[0].startswith("model.layers.0.w")
    )
    return name, begin, length


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def truncated(path: Path) -> str:
    name, begin, length = first_tensor(path)
    os.truncate(path / "__1_0.distcp", begin + length // 2)
    return f"__1_0.distcp: '{name}': expected a file of"


def longer(path: Path) -> str:
    with (path / "__0_0.distcp").open("ab") as file:
        file.write(b"0")
    return "__0_0.distcp: expected a file of"


def flipped(path: Path) -> str:
    name, begin, length = first_tensor(path)
    flip(path / "__1_0.distcp", begin + length - length // 3)
    return f"__1_0.distcp: '{name}': expected bytes {begin} to {begin + length} as they"


def missing(path: Path) -> str:
    (path / "__1_0.distcp").unlink()
    return f"__1_0.distcp: expected a file with '{items_of(path, '__1_0.distcp')[0][0]}"


def duplicated(path: Path) -> str:
    """In the place of another, of its length."""
    data = (path / "__0_0.distcp").read_bytes()
    size = (path / "__1_0.distcp").stat().st_size
    (path / "__1_0.distcp").write_bytes(data.ljust(size, b"0")[:size])
    return (
        f"__1_0.distcp: '{items_of(path, '__1_0.distcp')[0][0]}': expected bytes 0 to"
    )


def foreign(path: Path) -> str:
    shutil.copy(path / "__0_0.distcp", path / "__2_0.distcp")
    return (
        "__2_0.distcp: expected only files that the manifest names, got a foreign one"
    )


def flipped_metadata(path: Path) -> str:
    flip(path / manifest.METADATA, 700)
    return ".metadata: expected its bytes, got others"


def missing_metadata(path: Path) -> str:
    (path / manifest.METADATA).unlink()
    return ".metadata: expected a file, got No such file"


def flipped_manifest(path: Path) -> str:
    data = (path / manifest.FILE_NAME).read_bytes()
    at = data.index(b'"order":1') + 8
    (path / manifest.FILE_NAME).write_bytes(data[:at] + b"7" + data[at + 1 :])
    return "lowtide.json: expected the bytes that were written, got others"


def truncated_manifest(path: Path) -> str:
    os.truncate(path / manifest.FILE_NAME, 1000)
    return "lowtide.json: expected JSON, got"


def another_metadata(path: Path) -> str:
    """Of a model with other shapes; the manifest has been made to vouch for it."""
    data = (path / manifest.METADATA).read_bytes()
    metadata = pickle.loads(data)
    index, info = next(
        (i, s) for i, s in metadata.storage_data.items() if i.fqn.startswith("model.")
    )
    metadata.storage_data[index] = type(info)(info.relative_path, 1, info.length)
    vouch_for(path, metadata)
    return f"{info.relative_path}: '{index.fqn}': expected a place that the manifest"


def vouch_for(path: Path, metadata: Any) -> None:
    data = pickle.dumps(metadata)
    (path / manifest.METADATA).write_bytes(data)
    known = manifest.parse((path / manifest.FILE_NAME).read_bytes(), "")
    file = manifest.File(len(data), checksums.of(known.algorithm, data))
    files = {**known.files, manifest.METADATA: file}
    changed = dataclasses.replace(known, files=files)
    (path / manifest.FILE_NAME).write_bytes(manifest.to_bytes(changed))


class Runs:
    """A pickle that runs something."""

    def __reduce__(self) -> Any:
        return os.putenv, ("LOWTIDE_TEST_RAN", "1")


def hostile_metadata(path: Path) -> str:
    vouch_for(path, Runs())
    return "nothing else in it, got UnpicklingError: posix.putenv"


DAMAGES = (
    *(truncated, longer, flipped, missing, duplicated, foreign),
    *(flipped_metadata, missing_metadata, flipped_manifest, truncated_manifest),
    *(another_metadata, hostile_metadata),
)


@pytest.fixture(scope="module")
def saved(pool_of, tmp_path_factory) -> Callable[[Path], Path]:
    """Copies of a checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("saved") / "it"
    pool_of(2).run(save_after, path, 2)

    def copy_to(folder: Path) -> Path:
        return shutil.copytree(path, folder / "it")

    return copy_to


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_refused_and_named(pool_of, saved, tmp_path, damage):
    path = saved(tmp_path)
    said = damage(path)
    texts = pool_of(2).run(refused, path)
    assert said in texts[0], texts[0]
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"lowtide: load: {path}/")


OTHER_MODELS = {
    "shape": (
        ModelConfig(dim=16, num_heads=2, kv_dim=2, ffn=12, logit_scale=True),
        ".distcp: 'model.layers.0.w1.weight': expected torch.float32 [12, 16], got "
        "torch.float32 [10, 16]",
    ),
    "more": (
        ModelConfig(
            dim=16, num_heads=2, kv_dim=2, ffn=10, num_layers=3, logit_scale=True
        ),
        "'model.layers.2.attention_norm.weight': expected every tensor of the model, "
        "got none",
    ),
    "fewer": (
        ModelConfig(dim=16, num_heads=2, kv_dim=2, ffn=10),
        ".distcp: 'model.scale': expected a tensor of the model, got one it",
    ),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
def test_another_model_is_refused(pool_of, saved, tmp_path, other):
    config, said = OTHER_MODELS[other]
    for text in pool_of(2).run(refused, saved(tmp_path), config=config):
        assert said in text, text


def load_other_dtypes(path: Path) -> list[str]:
    """Of parameters, and of one state of the optimizer."""
    texts = []
    for of_states in (False, True):
        model, optimizer = make(1)
        if of_states:
            train(model, optimizer, range(1))
            state = optimizer.state[model.scale]
            state["exp_avg"] = state["exp_avg"].bfloat16()
        else:
            model.to(torch.bfloat16)
        before = shards(model, optimizer)
        with pytest.raises(CheckpointError) as raised:
            lowtide.load(path, model, optimizer)
        assert_same_tensors(shards(model, optimizer), before, "untouched")
        texts.append(str(raised.value))
    return texts


def test_other_dtypes_are_refused(pool_of, saved, tmp_path):
    names = ("model.scale", "optimizer.state.scale.exp_avg")
    for texts in pool_of(2).run(load_other_dtypes, saved(tmp_path)):
        for text, name in zip(texts, names, strict=True):
            assert f".distcp: '{name}': expected torch.bfloat16 [" in text
            assert "got torch.float32 [" in text


def load_other_optimizers(path: Path) -> list[str]:
    model, _ = make(1)
    texts = []
    groups = [{"params": [p]} for p in model.parameters()]
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(groups),
        torch.optim.AdamW(list(model.parameters())[1:]),
    ):
        with pytest.raises(CheckpointError) as raised:
            lowtide.load(path, model, optimizer)
        texts.append(str(raised.value))
        assert not optimizer.state
    return texts


def test_another_optimizer_is_refused(pool_of, saved, tmp_path):
    for texts in pool_of(2).run(load_other_optimizers, saved(tmp_path)):
        assert "parameter group 0: expected SGD's dampening, momentum, nest" in texts[0]
        assert "expected the parameters of group 0, got others" in texts[1]
        assert "expected the parameters of group 0, got others: 'scale'" in texts[2]


# -- a rank that fails alone -----------------------------------------------------------


def fail_alone(path: Path, where: str) -> str:
    """Rank 1 can not do what the others can."""
    if dist.get_rank() == 1:
        from lowtide.saving import commit, verification

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise OSError(5, "Input/output error")

        if where == "verification":
            verification._checksum = fail
        elif where == "reading":
            torch.load = fail
        else:
            before = commit.Write.make
            made = []

            def make_three(self: Any) -> None:
                before(self)
                made.append(self)
                if len(made) == 3:
                    fail()

            commit.Write.make = make_three
    return refused(path)


@pytest.mark.parametrize("where", ["verification", "reading", "writing"])
def test_a_rank_that_fails_alone_fails_all(saved, tmp_path, where):
    from support.ranks import RankPool

    with RankPool(2) as pool:
        for text in pool.run(fail_alone, saved(tmp_path), where):
            assert "got on rank 1 of 2: OSError: [Errno 5] Input/output error" in text


def load_what_changes(path: Path) -> str:
    """The file changes when it has been verified."""
    from lowtide.saving import verification

    before = verification.verify

    def verify(*args: Any) -> None:
        before(*args)
        dist.barrier()
        if dist.get_rank() == 0:
            flipped(path)
        dist.barrier()

    verification.verify = verify
    try:
        return refused(path)
    finally:
        verification.verify = before


def test_bytes_are_compared_again_as_they_are_used(pool_of, saved, tmp_path):
    path = saved(tmp_path)
    name, begin, length = first_tensor(path)
    said = f"__1_0.distcp: '{name}': expected bytes {begin} to {begin + length} as they"
    for text in pool_of(2).run(load_what_changes, path):
        assert said in text, text


# -- checkpoints of torch's ------------------------------------------------------------


def save_hostile_object(path: Path) -> None:
    model, _ = make()
    dcp.save({"model": model.state_dict(), "run": Runs()}, checkpoint_id=path)


def load_hostile_object(path: Path) -> str:
    model, _ = make(1)
    vouched = pytest.warns(UserWarning, match="nothing vouches for its bytes")
    with vouched, pytest.raises(CheckpointError) as raised:
        lowtide.load(path, model)
    assert "LOWTIDE_TEST_RAN" not in os.environ
    return str(raised.value)


def test_no_object_runs_when_it_is_loaded(pool_of, tmp_path):
    pool_of(2).run(save_hostile_object, tmp_path / "it")
    for text in pool_of(2).run(load_hostile_object, tmp_path / "it"):
        assert "'run': expected tensors, numbers, strings and containers" in text


def save_what_can_not_be_loaded(path: Path) -> list[str]:
    model, optimizer = make()
    texts = []
    for extra in ({"it": Runs()}, {"model": model}, {3: 4}):
        with pytest.raises((CheckpointError, ValueError)) as raised:
            lowtide.save(path, model, optimizer, extra)
        texts.append(str(raised.value))
    assert not path.exists() and not list(path.parent.iterdir())
    return texts


def test_what_could_not_be_loaded_is_not_saved(pool_of, tmp_path):
    for texts in pool_of(2).run(save_what_can_not_be_loaded, tmp_path / "it"):
        assert "'extra.it': expected tensors, numbers, strings and" in texts[0]
        assert "expected 'model' to be a plain value, got a" in texts[1]
        assert "extra: expected names, got 3" in texts[2]
