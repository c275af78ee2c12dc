"""What `fully_shard` and a forward move to the device, and models that move there and
back, on torch's CUDA over the dry driver: as with FSDP2."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lowtide._torch_version import VERSION
from support import device_moves_dry_run
from support.dry_cuda import run_dry

MEMORY = 8 << 30


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], dict[str, Any]]:
    program = device_moves_dry_run.__file__
    ours, theirs = (
        json.loads(run_dry([program, name], memory=MEMORY))
        for name in ("lowtide", "fsdp2")
    )
    return ours, theirs


def test_a_model_that_was_made_on_the_host_is_moved_but_for_what_is_ignored(found):
    ours, theirs = found
    assert ours["made on the host"] == theirs["made on the host"]
    sharded, moved = ours["made on the host"]
    assert sharded["second.weight"] == sharded["second.bias"] == "cpu"
    assert sharded["first.weight"] == sharded["offset"] == "cuda"
    assert set(moved.values()) == {"cuda"}


def test_the_roots_inputs_are_moved_however_they_are_nested(found):
    ours, theirs = found
    assert ours["given on the host"] == theirs["given on the host"] == ["cuda"] * 8


def test_gradients_move_with_a_model_and_keep_their_dtype(found):
    ours, theirs = found
    known = 3 if VERSION >= (2, 15) else 1  # FSDP2 follows grad_dtype from 2.15 on
    assert ours["moved"][:known] == theirs["moved"][:known]
    for _, on_host, same, back, trained in ours["moved"]:
        assert same
        assert {grad[0] for *_, grad in on_host} == {"cpu"}
        assert {grad[0] for *_, grad in back + trained} == {"cuda"}
        assert {grad[1] for *_, grad in on_host + trained} == {"torch.float32"}


def test_a_move_while_gradients_wait_is_refused(found):
    ours, _ = found
    assert ours["waiting"] == (
        "lowtide: unit 'Net': expected parameters to keep dtype, class and device "
        "while gradients accumulate without sync, got others. Convert after a backward "
        "that reduces, or after zero_grad()."
    )
