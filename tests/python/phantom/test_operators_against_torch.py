"""Operators allocate and free on the phantom what torch's own CUDA operators do, in the
same order.

The CUDA side is the installed torch, run dry over the dry driver
(csrc/phantom/driver): its operators and its allocator are the real ones, only kernels
do nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from support import operator_dry_run
from support.dry_cuda import run_dry
from support.operator_cases import CASES
from support.operator_dry_run import Events, dry_run, record_on_phantom
from support.phantom import Processes

Runs = tuple[dict[str, tuple[Events, Events]], dict[str, tuple[Events, Events]]]


def run_on_phantom() -> dict[str, tuple[Events, Events]]:
    return dry_run("phantom", record_on_phantom)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    printed = run_dry([operator_dry_run.__file__], memory=80 << 30, events="immediate")
    processes = Processes()
    yield json.loads(printed.splitlines()[-1]), processes("meta").run(run_on_phantom)
    processes.close()


@pytest.mark.parametrize("name", CASES)
def test_operator(runs: Runs, name: str):
    cuda, phantom = runs
    forward, backward = cuda[name]
    assert phantom[name] == (forward, backward)
