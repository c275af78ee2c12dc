"""Which checksum a checkpoint has, and what a rank without its package does."""

from __future__ import annotations

import contextlib
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import lowtide
from lowtide.saving import CheckpointError, checksums, manifest
from support.bits import assert_same_tensors
from support.saving import full, make, save_after, shards, train


@contextlib.contextmanager
def without_xxhash(*ranks: int) -> Iterator[None]:
    name, missing = "xxhash", dist.get_rank() in ranks
    with pytest.MonkeyPatch.context() as patch:
        if missing:
            patch.setitem(sys.modules, name, None)
        yield


def save_without(path: Path, *ranks: int) -> Any:
    with without_xxhash(*ranks):
        return save_after(path, 1)


def load_without(path: Path, *ranks: int) -> Any:
    """The whole state, or the error; the model is as it was then."""
    model, optimizer = make(1)
    train(model, optimizer, range(1))
    before = shards(model, optimizer)
    try:
        with without_xxhash(*ranks):
            lowtide.load(path, model, optimizer)
    except CheckpointError as error:
        assert_same_tensors(shards(model, optimizer), before, "untouched")
        return str(error)
    return full(model, optimizer)


def algorithm_of(path: Path) -> str:
    return json.loads((path / manifest.FILE_NAME).read_text())["checksum"]


def test_all_ranks_need_the_package_of_the_faster_checksum(pool_of, tmp_path):
    pool = pool_of(2)
    saved = pool.run(save_without, tmp_path / "with")
    assert algorithm_of(tmp_path / "with") == checksums.XXH3
    for text in pool.run(load_without, tmp_path / "with", 1):
        assert text == (
            f"lowtide: load: expected the package xxhash, whose {checksums.XXH3} "
            "vouches for what was saved, got none. Run "
            f"`{sys.executable} -m pip install xxhash`."
        )
    pool.run(save_without, tmp_path / "without", 1)
    assert algorithm_of(tmp_path / "without") == checksums.CRC32
    for missing in ((), (0, 1)):
        for state in pool.run(load_without, tmp_path / "without", *missing):
            assert_same_tensors(state, saved[0], f"loaded without xxhash on {missing}")


def as_version_1(path: Path) -> None:
    """The manifest that the first lowtide would have written."""
    body = json.loads((path / manifest.FILE_NAME).read_text())
    del body["crc32"]
    for file in body["files"].values():
        file["crc32"] = int(file.pop("checksum"), 16)
        for item in file["items"]:
            item[3] = int(item[3], 16)
    body["version"] = 1
    body["crc32"] = zlib.crc32(manifest._dump(body))
    (path / manifest.FILE_NAME).write_bytes(manifest._dump(body))


def test_checkpoints_of_version_1_are_verified(pool_of, tmp_path):
    pool, path = pool_of(2), tmp_path / "it"
    saved = pool.run(save_without, path, 0, 1)
    as_version_1(path)
    for state in pool.run(load_without, path):
        assert_same_tensors(state, saved[0], "version 1")
    data = bytearray((path / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 4
    (path / "__1_0.distcp").write_bytes(data)
    for text in pool.run(load_without, path):
        assert f"{path}/__1_0.distcp: '" in text and "as they were saved" in text
