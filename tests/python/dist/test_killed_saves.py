"""A save that is killed, or can not write, leaves what was there before loadable, and
the next one removes what it left."""

from __future__ import annotations

import errno
import functools
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import lowtide
from lowtide.saving import CheckpointError, folders, manifest, writer
from support.bits import assert_same_tensors
from support.ranks import RankPool
from support.saving import full, make, save_after, train

# -- every point at which a process can die -------------------------------------------


class Points:
    """Calls that change what is on storage, as a rank makes them; at the chosen one it
    is killed, before that call."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.passed: list[str] = []

    def reach(self, what: str) -> None:
        if self.kill_at == len(self.passed):
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed.append(what)

    def watch(self) -> None:
        for module, name in (
            *((os, name) for name in ("mkdir", "rename", "fsync")),
            (shutil, "rmtree"),
            (writer._Checked, "begin_item"),
        ):
            setattr(module, name, self._reached_by(name, getattr(module, name)))

    def _reached_by(self, what: str, function: Callable[..., Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if what != "rmtree" or os.path.exists(args[0]):
                self.reach(what)
            return function(*args, **kwargs)

        return call


def save_and_die(path: Path, victim: int, kill_at: int | None) -> list[str]:
    model, optimizer = make()
    train(model, optimizer, range(1))
    points = Points(kill_at if dist.get_rank() == victim else None)
    points.watch()
    lowtide.save(path, model, optimizer, {"step": 1}, keep=1)
    return points.passed


def of_one_rank(path: Path) -> tuple[int, Any]:
    model, optimizer = make(1)
    extra = lowtide.load(path, model, optimizer)
    return extra["step"], full(model, optimizer)


def save_again(path: Path) -> list[str]:
    model, optimizer = make()
    lowtide.save(path, model, optimizer, {"step": 9})
    return sorted(entry.name for entry in path.parent.iterdir())


def chosen(points: list[str]) -> list[int]:
    """Every call, but of the many items of a file the first, a middle one and the
    last."""
    items = [k for k, what in enumerate(points) if what == "begin_item"]
    skipped = set(items) - {items[0], items[len(items) // 2], items[-1]}
    return [k for k in range(len(points)) if k not in skipped]


@pytest.fixture(scope="module")
def states(pool_of, tmp_path_factory) -> Any:
    """What is saved behind no step and behind one; a checkpoint of the first."""
    folder = tmp_path_factory.mktemp("states")
    return [pool_of(2).run(save_after, folder / f"{n}", n)[0] for n in (0, 1)], folder


# Another path than the last save's, or the same.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("step-1", id="beside", marks=pytest.mark.slow),
        pytest.param("step-0", id="in_its_place"),
    ],
)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_kill_leaves_a_checkpoint(pool_of, states, tmp_path, victim, name):
    by_step, saved = states

    def folder_of(k: object) -> Path:
        made = tmp_path / str(k)
        shutil.copytree(saved / "0", made / "step-0")
        return made

    with RankPool(2) as pool:
        rehearsal = folder_of("rehearsal") / name
        points = pool.run(save_and_die, rehearsal, victim, None)[victim]
    assert {"fsync", "begin_item"} <= set(points)
    left_something = 0
    for k in chosen(points):
        folder = folder_of(k)
        with RankPool(2) as pool:
            outcomes = pool.outcomes(save_and_die, folder / name, victim, k, timeout=20)
        assert outcomes[victim].kind == "died", points[k]
        other = outcomes[1 - victim]
        # The rename is made known to the others after it.
        if victim == 1 or "CheckpointError" in other.error_type:
            assert "A rank has ended" in other.error, other
        left = [entry.name for entry in folder.iterdir()]
        left_something += any(entry.startswith(".") for entry in left)
        # The folder's newest, and what was there before, are whole.
        step, state = pool_of(1).run(of_one_rank, folder)[0]
        assert_same_tensors(state, by_step[step], f"killed before {points[k]} ({k})")
        if name == "step-1" and "step-0" in left:
            step, state = pool_of(1).run(of_one_rank, folder / "step-0")[0]
            assert step == 0
            assert_same_tensors(state, by_step[0], f"killed before {points[k]} ({k})")
        elif name == "step-0":
            pool_of(1).run(of_one_rank, folder / name)
        names = pool_of(1).run(save_again, folder / "step-9")[0]
        assert set(names) <= {"step-0", "step-1", "step-9"}, names
        assert "step-0" in names, f"killed before {points[k]} ({k})"
    assert left_something or victim == 1, "rank 0 leaves folders"


# -- what can not be written ----------------------------------------------------------


def save_fails(path: Path, how: str) -> tuple[str, list[str]]:
    model, optimizer = make()
    train(model, optimizer, range(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "full" and dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    elif how == "full at rank 0's":
        before = writer.folders.synchronize

        def no_space(folder: Path) -> None:
            if folder == path.parent:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            before(folder)

        writer.folders.synchronize = no_space
    try:
        with pytest.raises(CheckpointError) as raised:
            lowtide.save(path, model, optimizer, {"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    train(model, optimizer, range(1, 2))
    return str(raised.value), [entry.name for entry in path.parent.iterdir()]


def test_a_full_disk_leaves_what_was_there(pool_of, states, tmp_path):
    by_step, saved = states
    shutil.copytree(saved / "0", tmp_path / "step-0")
    with RankPool(2) as pool:
        results = pool.run(save_fails, tmp_path / "step-0", "full")
    for text, names in results:
        assert "got on rank 1 of 2: OSError: [Errno 27] File too large" in text
        assert names == ["step-0"], "nothing is left"
    step, state = pool_of(1).run(of_one_rank, tmp_path)[0]
    assert step == 0
    assert_same_tensors(state, by_step[0], "what was there")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m tmpfs {folder} 2>/dev/null") != 0:
        pytest.skip("only root mounts a file system")
    yield folder
    os.system(f"umount {folder}")


def save_until_full(folder: Path) -> tuple[str, list[str]]:
    model, optimizer = make()
    train(model, optimizer, range(1))
    for step in range(100):
        try:
            lowtide.save(folder / f"{step}", model, optimizer, {"step": step})
        except CheckpointError as error:
            loaded = lowtide.load(folder, model, optimizer)
            assert loaded["step"] == step - 1
            return str(error), sorted(entry.name for entry in folder.iterdir())
    raise AssertionError("never full")


def test_a_disk_that_fills_up_keeps_the_checkpoints_it_has(pool_of, small_disk):
    for text, names in pool_of(2).run(save_until_full, small_disk):
        assert "No space left on device" in text
        assert names and not any(name.startswith(".") for name in names)


def save_read_only(path: Path) -> tuple[str, int]:
    model, optimizer = make()
    try:
        lowtide.save(path / "step-1", model, optimizer, {"step": 1})
    except CheckpointError as error:
        return str(error), lowtide.load(path, model, optimizer)["step"]
    raise AssertionError("saved")


def check_read_only(pool: RankPool, folder: Path, said: str) -> None:
    for text, step in pool.run(save_read_only, folder):
        assert f"got on rank 0 of 2: {said}" in text
        assert step == 0


def test_a_disk_that_is_read_only_keeps_what_it_has(pool_of, small_disk):
    pool_of(2).run(save_after, small_disk / "step-0", 0)
    assert os.system(f"mount -o remount,ro {small_disk}") == 0
    check_read_only(pool_of(2), small_disk, "OSError: [Errno 30] Read-only file system")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not stop root")
def test_a_folder_that_is_read_only_keeps_what_it_has(pool_of, tmp_path):
    pool_of(2).run(save_after, tmp_path / "step-0", 0)
    tmp_path.chmod(0o500)
    check_read_only(pool_of(2), tmp_path, "PermissionError: [Errno 13] Permission")
    tmp_path.chmod(0o700)


def published_behind(path: Path) -> list[str]:
    """Files whose bytes ranks have put on storage when the checkpoint is renamed."""
    model, optimizer = make()
    store = dist.distributed_c10d._get_default_store()
    fsync, rename = os.fsync, os.rename
    on_storage: list[str] = []

    def noted_fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        fsync(number)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{number}"))
        store.set(f"on storage/{name}", "")

    def noted_rename(source: Any, target: Any, **how: Any) -> None:
        if os.fspath(target) == os.fspath(path):
            names = ["__0_0.distcp", "__1_0.distcp", ".metadata", "lowtide.json"]
            on_storage.extend(n for n in names if store.check([f"on storage/{n}"]))
            store.set("renamed", "")
        elif os.fspath(source).endswith(".tmp"):  # DCP's, of its metadata
            store.set(f"on storage/{os.path.basename(target)}", "")
        rename(source, target, **how)

    os.fsync, os.rename = noted_fsync, noted_rename
    try:
        lowtide.save(path, model, optimizer)
    finally:
        os.fsync, os.rename = fsync, rename
    assert store.check(["renamed"])
    return on_storage


def test_a_checkpoint_is_renamed_when_every_ranks_file_is_on_storage(tmp_path):
    with RankPool(2) as pool:
        of_rank_0, of_rank_1 = pool.run(published_behind, tmp_path / "it")
    assert of_rank_0 == ["__0_0.distcp", "__1_0.distcp", ".metadata", "lowtide.json"]
    assert of_rank_1 == []


def save_below_a_file(path: Path) -> str:
    model, optimizer = make()
    with pytest.raises(CheckpointError) as raised:
        lowtide.save(path / "below" / "it", model, optimizer)
    with pytest.raises(CheckpointError, match="expected a path where nothing is"):
        lowtide.save(path, model, optimizer)
    return str(raised.value)


def test_a_folder_that_can_not_be_made_is_every_ranks_error(pool_of, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for text in pool_of(2).run(save_below_a_file, tmp_path / "file"):
        assert "got on rank 0 of 2: NotADirectoryError" in text
    assert (tmp_path / "file").read_text() == "not a folder"


# -- old ones, other writers ----------------------------------------------------------


def save_several(folder: Path, keep: int) -> list[str]:
    model, optimizer = make()
    names = []
    for step in range(4):
        lowtide.save(folder / f"step-{step}", model, optimizer, keep=keep)
        names.append(" ".join(sorted(entry.name for entry in folder.iterdir())))
    return names


def test_keep_leaves_so_many_old_ones(pool_of, tmp_path):
    (tmp_path / "notes").mkdir()
    assert pool_of(2).run(save_several, tmp_path, 1)[0] == [
        "notes step-0",
        "notes step-0 step-1",
        "notes step-1 step-2",
        "notes step-2 step-3",
    ]


def test_a_folder_that_somebody_writes_is_left_to_him(tmp_path):
    with folders.aside(tmp_path / "one") as one:
        with folders.aside(tmp_path / "other") as other:
            assert one.path.exists() and other.path.exists()
        assert one.path.exists() and not other.path.exists()
    assert not list(tmp_path.iterdir())


def meanwhile(path: Path) -> threading.Thread:
    """Somebody else saves to ``path``; long enough to be done if nothing holds him."""

    def save() -> None:
        with folders.aside(path) as made:
            files = {manifest.METADATA: manifest.File(0, "0" * 16)}
            whole = manifest.to_bytes(manifest.Manifest(made.order, 1, files))
            (made.path / manifest.FILE_NAME).write_bytes(whole)
            folders.publish(made)

    other = threading.Thread(target=save)
    other.start()
    other.join(0.5)
    return other


def test_a_folder_that_is_not_locked_yet_is_left_to_its_save(tmp_path, monkeypatch):
    others, lock = [], folders._locked

    def late(folder: Path, *how: int) -> Any:
        if "one.writing" in folder.name:
            others.append(meanwhile(tmp_path / "other"))
        return lock(folder, *how)

    monkeypatch.setattr(folders, "_locked", late)
    with folders.aside(tmp_path / "one") as one:
        (other,) = others
        other.join()
        assert one.path.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_checkpoint_between_two_names_is_left_to_its_save(tmp_path, monkeypatch):
    meanwhile(tmp_path / "one").join()
    others, rename = [], os.rename

    def slow(old: Path, new: Path) -> None:
        rename(old, new)
        if ".one.replaced" in str(new):
            others.append(meanwhile(tmp_path / "other"))

    monkeypatch.setattr(os, "rename", slow)
    meanwhile(tmp_path / "one").join()
    for other in others:
        other.join()
    assert others
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]
    assert sorted(each.order for each in folders.published(tmp_path)) == [2, 3]


# -- in the background ----------------------------------------------------------------


def fail_in_background(path: Path) -> tuple[list[str], int]:
    model, optimizer = make()
    train(model, optimizer, range(1))
    lowtide.save(path, model, optimizer, {"step": 1})
    texts = []

    def no_space(self: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = writer._Checked.begin_item
    for find_out in ("wait", "next save"):
        writer._Checked.begin_item = no_space
        saving = lowtide.save(path, model, optimizer, {"step": 2}, in_background=True)
        train(model, optimizer, range(1, 2))
        assert saving is not None
        save_again = functools.partial(lowtide.save, path, model, optimizer)
        with pytest.raises(CheckpointError) as raised:
            (saving.wait if find_out == "wait" else save_again)()
        texts.append(str(raised.value))
        writer._Checked.begin_item = before
    return texts, lowtide.load(path, model, optimizer)["step"]


def test_an_error_in_the_background_is_heard_by_the_next_call(tmp_path):
    with RankPool(2) as pool:
        for texts, step in pool.run(fail_in_background, tmp_path / "it"):
            assert all("No space left on device" in text for text in texts)
            assert step == 1


def exceed_the_budget(path: Path) -> list[Any]:
    model, optimizer = make()
    train(model, optimizer, range(1))
    save = functools.partial(lowtide.save, path, model, optimizer, in_background=True)
    with pytest.warns(UserWarning, match="expected a snapshot of at most 1000 bytes"):
        waited = save(snapshot_bytes=1000)
    saving = save(snapshot_bytes=10**6)
    assert saving is not None
    saving.wait()
    return [waited, saving.done()]


def test_a_snapshot_takes_no_more_than_it_may(pool_of, tmp_path):
    assert pool_of(2).run(exceed_the_budget, tmp_path / "it") == [[None, True]] * 2
