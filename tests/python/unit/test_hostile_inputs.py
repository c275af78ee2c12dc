"""What comes from outside is read as its rule says or refused by name: any text, any
bytes; nothing is unpickled that could run, and nothing listens beyond this machine."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import resource
import stat
import tempfile
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
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

import lowtide
from lowtide._base import debugging, environment
from lowtide._base.memory import pinned_cap
from lowtide._sharding import groups
from lowtide.integrations.policy_text import parse_policy
from lowtide.phantom.clock import timeline
from lowtide.phantom.dry import ends, launch, ranks
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


# What reads each variable of ours and of torchrun's. The dry driver reads LOWTIDE_DRY_*
# itself, before Python does (tests/cpp/driver/settings_test.cpp).
READERS: dict[str, Callable[[], Any]] = {
    "LOWTIDE_PINNED_BYTES": pinned_cap,
    "LOCAL_WORLD_SIZE": pinned_cap,
    "RANK": lambda: environment.number("RANK", 0),
    "LOWTIDE_COMMUNICATORS": groups.one_communicator,
    "LOWTIDE_COMPARE_RANKS": groups.compares_ranks,
    "LOWTIDE_DEBUG": debugging.enabled.__wrapped__,
    "LOWTIDE_DRY_GPU": timeline,
}
OF_THE_DRIVER = {
    f"LOWTIDE_DRY_{name}" for name in ("DEVICES", "EVENTS", "HANG", "LIMIT")
}
OF_THE_DRIVER |= {f"LOWTIDE_DRY_{name}" for name in ("GPU", "MEMORY", "PATIENCE")}
FOLDERS = {"LOWTIDE_DEBUG_LOG"}  # which any text may name


@pytest.mark.parametrize("name", READERS)
@given(text=VALUES)
@settings(max_examples=60)
def test_settings_of_the_environment_are_known_or_refused(name: str, text: str) -> None:
    with mock.patch.dict(os.environ, {name: text}):
        value = value_or_message(READERS[name])
    if isinstance(value, str):
        assert value.startswith((f"lowtide: {name}: expected ", "lowtide: phantom."))


def test_every_variable_is_known_here() -> None:
    """``os.environ`` and ``getenv`` are asked for these, and for others' that are not
    parsed."""
    named = set()
    for folder, pattern in (("python/lowtide", "*.py"), ("csrc", "*.[ch]*")):
        for file in (ROOT / folder).rglob(pattern):
            text = file.read_text()
            named |= set(re.findall(r'"(LOWTIDE_[A-Z_]+[A-Z])"', text))
    named.discard("LOWTIDE_RULE_NAME_")
    assert named == {
        *(name for name in READERS if name.startswith("LOWTIDE_")),
        *OF_THE_DRIVER,
        *FOLDERS,
    }


# Names that are almost patterns.
NAMES = st.lists(
    st.sampled_from(
        ["0", "2", "linear", "*", "?", "[", "]", "[a-", ".", "..", "x", "²"]
    ),
    min_size=1,
    max_size=6,
).map("".join)


@given(st.lists(st.one_of(NAMES, st.text(max_size=8)), max_size=3), st.booleans())
@settings(max_examples=150)
def test_names_of_a_policy_are_found_or_refused(
    names: list[str], offload: bool
) -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"linear": nn.Linear(2, 2)}))
    block = nn.Sequential(block[0], nn.Tanh())

    def attach() -> Any:
        lists: dict[str, Any] = {"offload" if offload else "save": names}
        return lowtide.checkpoint(block, lowtide.ActivationPolicy(**lists))

    found = value_or_message(attach)
    assert found is block or found.startswith("lowtide: "), found


@given(st.text())
@example('Current thread\n  File "')
@example('  File "a", line 99999999999999999999 in f\n' * 3)
@settings(max_examples=100)
def test_what_a_process_says_of_its_end_is_a_line_or_nothing(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told")
        told.write_bytes(text.encode("utf-8", "surrogatepass"))
        assert isinstance(ends.last_line(told), str)


@given(st.one_of(st.binary(max_size=40), st.text(alphabet='{}[]":,1ea ')))
@example(b"[" * 100_000)
@example(b'{"calls": [')
@settings(max_examples=150)
def test_a_report_is_whole_or_none(given: bytes | str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "0.json")
        file.write_bytes(given if isinstance(given, bytes) else given.encode())
        found = ranks.whole_report(file)
    assert found is None or found == json.loads(given)


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


# What reads bytes of a file or JSON of another process, and which tests give it others.
# Plans, reports, memory snapshots and replay logs are written and never read; a script
# or model file is a program.
READS = {
    "saving/folders.py": "test_saving_manifest.py",
    "saving/manifest.py": "test_saving_manifest.py",
    "saving/metadata.py": "this file",
    "saving/planners.py": "test_hostile_checkpoints.py",
    "saving/verification.py": "test_hostile_checkpoints.py",
    "saving/writer.py": "its own, just written",
    "phantom/dry/ends.py": "this file",
    "phantom/dry/objects.py": "objects of dry ranks, of one user, on the loopback",
    "phantom/dry/program.py": "its own arguments",
    "phantom/dry/ranks.py": "this file",
    "planning/build.py": "the system's own",
    "planning/decisions.py": "the program's sources, which run anyway",
    "planning/model_file.py": "likewise",
    "planning/stacks.py": "likewise",
    "_sharding/misread.py": "likewise",
    "cli/env.py": "the system's own",
}
READING = re.compile(
    r"(^|\.)(read_text|read_bytes|loads|load|_Unpickler|getlines?|literal_eval|mmap)$"
)
NO_FILES = ("dcp.load", "background.load", "self.load", "functools", "saving.load")


def test_every_reader_of_a_file_is_known_here() -> None:
    package, found = ROOT / "python/lowtide", set()
    for file in package.rglob("*.py"):
        for name, call in calls(file):
            reads = READING.search(name) and not name.startswith(NO_FILES)
            modes = [ast.unparse(each) for each in (*call.args, *call.keywords)]
            opens = name.endswith("open") and any("'r" in mode for mode in modes)
            if reads or opens:
                found.add(str(file.relative_to(package)))
    assert found == set(READS)


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
