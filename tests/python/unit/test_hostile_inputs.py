"""What comes from outside is read as its rule says or refused by name: any text, any
bytes; nothing is unpickled that could run, and nothing listens beyond this machine."""

from __future__ import annotations

import ast
import os
import pickle
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from lowtide._base import environment
from lowtide._base.memory import pinned_cap
from lowtide._sharding import groups
from lowtide.integrations.policy_text import parse_policy
from lowtide.phantom.dry import launch
from lowtide.phantom.dry.stores import Meeting, SharedStore
from lowtide.saving import CheckpointError, metadata

ROOT = Path(__file__).parents[3]


def value_or_message(read: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    try:
        return read(*given, **settings)
    except (ValueError, CheckpointError) as error:
        return str(error)


# -- texts ----------------------------------------------------------------------------

FIELDS = ("save", "offload", "recompute", "min_bytes", "prefetch", "keep_last", "x")
PIECES = st.one_of(
    st.sampled_from([*FIELDS, "=", ";", ",", "input", "*.attn", "7", " ", "²", "٣"]),
    st.text(max_size=3),
)


@given(st.one_of(st.lists(PIECES, max_size=12).map("".join), st.text()))
@example("min_bytes=" + "9" * 5000)
@example("prefetch=²")
@example("keep_last=-1")
@settings(max_examples=300)
def test_a_policy_is_one_or_refused(text: str) -> None:
    policy = value_or_message(parse_policy, text)
    if isinstance(policy, str):
        assert policy.startswith("lowtide: "), text
    else:
        assert all(policy.treatments()) and policy.min_bytes >= 0


# What os.environ can hold.
VALUES = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30
)


@given(st.one_of(VALUES, st.integers().map(str)), st.integers(0, 9))
@example("9" * 5000, 0)
@example("٣", 0)
@example("1_0", 0)
@settings(max_examples=300)
def test_a_number_of_the_environment_is_one_or_refused(text: str, least: int) -> None:
    with mock.patch.dict(os.environ, {"LOWTIDE_X": text}):
        value = value_or_message(environment.number, "LOWTIDE_X", 3, least=least)
    if isinstance(value, str):
        assert value.startswith("lowtide: LOWTIDE_X: expected an integer >= ")
    else:
        assert value >= least if text else value == 3
        assert not text or value == int(text)


@given(VALUES)
@settings(max_examples=100)
def test_settings_of_the_environment_are_known_or_refused(text: str) -> None:
    names = ("LOWTIDE_PINNED_BYTES", "LOCAL_WORLD_SIZE", "LOWTIDE_COMMUNICATORS")
    for name, read in zip(
        names, (pinned_cap, pinned_cap, groups.one_communicator), strict=True
    ):
        with mock.patch.dict(os.environ, {name: text}):
            value = value_or_message(read)
        if isinstance(value, str):
            assert value.startswith(f"lowtide: {name}: expected ")


# -- bytes ----------------------------------------------------------------------------

_CHUNK = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
WRITTEN = pickle.dumps(
    Metadata(
        {
            "a": TensorStorageMetadata(
                TensorProperties(torch.float32), torch.Size([4]), [_CHUNK]
            ),
            "b": BytesStorageMetadata(),
        },
        storage_data={},
    )
)


def parsed(data: bytes) -> Any:
    found = value_or_message(metadata.parse, data, "it")
    if isinstance(found, str):
        assert found.startswith("lowtide: load: it/.metadata: expected ")
        return None
    return found


@given(st.data())
@settings(max_examples=400)
def test_metadata_with_other_bytes_is_metadata_or_refused(data: st.DataObject) -> None:
    changed = bytearray(WRITTEN)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        new = data.draw(st.binary(max_size=3))
        changed[at : at + data.draw(st.integers(0, 3))] = new or b"."
    found = parsed(bytes(changed))
    assert found is None or isinstance(found, Metadata)


@given(st.binary(max_size=200))
def test_any_bytes_are_metadata_or_refused(data: bytes) -> None:
    assert parsed(data) is None
    assert parsed(b"\x80\x04" + data) is None


@pytest.mark.parametrize("operation", [b"r\0\0\0\x08", b"p134217728\n"])
def test_few_bytes_do_not_take_gigabytes(operation):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert parsed(WRITTEN[:-1] + operation + WRITTEN[-1:]) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@given(st.integers(0, len(WRITTEN)))
@settings(max_examples=60)
def test_nothing_runs_wherever_it_is_put(at: int) -> None:
    call = pickle.dumps(_Runs())[2:-1]  # without its protocol and its end
    parsed(WRITTEN[:at] + call + WRITTEN[at:])
    assert not Path("ran").exists()


# -- what the sources may not do ------------------------------------------------------

# A reader of its own that lets in only known classes, and the objects that ranks of a
# dry run, of one user, exchange on this machine.
MAY_UNPICKLE = {"saving/metadata.py", "phantom/dry/objects.py"}


def calls(file: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_pickles_are_loaded_with_weights_alone() -> None:
    package = ROOT / "python/lowtide"
    found = set()
    for folder in (package, ROOT / "examples"):
        for file in folder.rglob("*.py"):
            for name, call in calls(file):
                if name == "torch.load":
                    given = {key.arg: ast.unparse(key.value) for key in call.keywords}
                    assert given.get("weights_only") == "True", f"{file}:{call.lineno}"
                elif name in ("pickle.load", "pickle.loads", "_Unpickler"):
                    found.add(str(file.relative_to(package)))
                assert name not in ("eval", "tempfile.mktemp", "os.system")
    assert found == MAY_UNPICKLE


# -- what others may reach ------------------------------------------------------------

LOOPBACK = "0100007F"


def listening(port: int) -> set[str]:
    """Addresses, as the kernel writes them."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        row[1].partition(":")[0]
        for row in rows
        if row[3] == "0A" and row[1].endswith(f":{port:04X}")
    }


def test_ranks_on_this_machine_meet_where_no_other_reaches_them() -> None:
    meeting = Meeting()
    assert listening(meeting.port) == {LOOPBACK}
    SharedStore.connect(meeting.port).set("a", "1")
    assert meeting._store.get("a") == b"1"


@pytest.mark.parametrize("what", ["link", "open to others"])
def test_a_folder_that_others_could_fill_is_refused(
    tmp_path, monkeypatch, what
) -> None:
    monkeypatch.setattr(launch.tempfile, "gettempdir", lambda: str(tmp_path))
    place = launch._place()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    if what == "link":
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.chmod(0o777)
    with pytest.raises(RuntimeError, match="that no other may write, got something"):
        launch._place()


def test_threads_that_find_no_folder_all_make_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(launch.tempfile, "gettempdir", lambda: str(tmp_path))
    together, symlink_to = threading.Barrier(2, timeout=10), Path.symlink_to

    def at_once(link: Path, target: Path) -> None:
        symlink_to(link, target)
        together.wait()

    monkeypatch.setattr(Path, "symlink_to", at_once)
    with ThreadPoolExecutor() as threads:
        (folder,) = set(threads.map(lambda _: launch._place(), range(2)))
    names = {"libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"}
    assert {path.name for path in folder.iterdir()} == names
