"""Folders beside each other: written aside, published by a rename, the oldest removed.

A checkpoint called `name` is written in `.name.writing-*`. All of it is on storage
before the rename that gives it its name, so whatever has the name is whole. What is to
be replaced or removed first loses its name by a rename, too: `.name.replaced-*`, which
is the checkpoint for as long as nothing has taken its place, and `.name.removed-*`.
The next save removes what killed processes have left. Whose process lives holds a lock
on the folder.

[Note: Saves beside each other]
Groups of ranks, such as a pipeline's stages, save to folders beside each other at the
same time. What is being made and not locked yet, or has lost its name and has no other
yet, is not what a killed process left: who changes such names, or goes by them, holds a
lock on the folder around them.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from lowtide.saving import manifest
from lowtide.saving.errors import CheckpointError

_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<kind>writing|replaced|removed)-[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class Aside:
    """Where a checkpoint is written until it is published; rank 0 makes it."""

    path: Path
    final: Path
    order: int


@contextlib.contextmanager
def aside(final: Path) -> Iterator[Aside]:
    """A new folder, locked; gone at the end unless it was published."""
    empty = final.is_dir() and not _entries(final)
    if os.path.lexists(final) and not is_checkpoint(final) and not empty:
        raise CheckpointError(
            f"lowtide: save: {final}: expected a path where nothing is, or a "
            "checkpoint to replace, got something else. Choose another path."
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with _names_of(final.parent):
            left = _take_what_is_left(final.parent)
            order = 1 + max((each.order for each in published(final.parent)), default=0)
            made = Aside(_beside(final, "writing"), final, order)
            made.path.mkdir()
            held.callback(shutil.rmtree, made.path, ignore_errors=True)
            held.enter_context(_locked(made.path))
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        yield made


def publish(written: Aside) -> None:
    """Every file of it is on storage, on every rank. Behind this it is the
    checkpoint."""
    synchronize(written.path)
    replaced: Path | None = None
    with _names_of(written.final.parent):
        if written.final.exists():
            replaced = _beside(written.final, "replaced")
            os.rename(written.final, replaced)
        try:
            os.rename(written.path, written.final)
        except OSError:
            if replaced is not None:
                os.rename(replaced, written.final)
            raise
    synchronize(written.final.parent)
    if replaced is not None:
        _remove(replaced)


def keep(newest: Path, count: int) -> None:
    """Removes all checkpoints beside ``newest`` but the ``count`` newest of them."""
    others = [each for each in published(newest.parent) if each.path != newest]
    others.sort(key=lambda each: each.order, reverse=True)
    for old in others[count:]:
        _remove(old.path)


@dataclasses.dataclass(frozen=True)
class Published:
    path: Path
    order: int


def published(folder: Path) -> list[Published]:
    """Checkpoints of ours in ``folder``. Those whose manifests are damaged are not
    among them, with a warning."""
    found = []
    named = [path for path in _entries(folder) if not path.name.startswith(".")]
    for path in (*named, *_replaced(folder)):
        if is_checkpoint(path):
            try:
                data = (path / manifest.FILE_NAME).read_bytes()
                found.append(Published(path, manifest.parse(data, str(path)).order))
            except (OSError, CheckpointError) as error:
                warnings.warn(f"{error} {path.name} is left out.", stacklevel=2)
    return found


def find(path: Path) -> Path:
    """The folder to read: ``path``, what it is to be replaced by a save that was
    killed, or the newest checkpoint in it."""
    if (path / manifest.METADATA).exists() or is_checkpoint(path):
        return path
    for left, name in _replaced(path.parent).items():
        if name == path.name:
            return left
    inside = published(path)
    if inside:
        return max(inside, key=lambda each: each.order).path
    raise CheckpointError(
        f"lowtide: load: {path}: expected a checkpoint, or a folder with checkpoints "
        f"of lowtide's, got {'neither' if path.exists() else 'nothing there'}. Pass "
        "the path that was saved to, or the folder it is in."
    )


def is_checkpoint(path: Path) -> bool:
    return (path / manifest.FILE_NAME).exists()


def _take_what_is_left(folder: Path) -> list[Path]:
    """By saves whose processes have ended: checkpoints get their names back, and what
    is to be removed one that no save goes by."""
    for left, name in _replaced(folder).items():
        os.rename(left, folder / name)
    taken = []
    for left, name, kind in _left_in(folder):
        if kind == "writing" and not _nobody_writes(left):
            continue
        nameless = _beside(folder / name, "removed")
        with contextlib.suppress(FileNotFoundError):  # its own save removes it
            os.rename(left, nameless)
            taken.append(nameless)
    return taken


def synchronize(folder: Path) -> None:
    """The names in it are on storage."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Without its name first: half of it must not look like a checkpoint."""
    if path.name.startswith("."):
        nameless = path
    else:
        nameless = _beside(path, "removed")
        os.rename(path, nameless)
    shutil.rmtree(nameless, ignore_errors=True)


def _beside(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}.{kind}-{secrets.token_hex(8)}"


def _replaced(folder: Path) -> dict[Path, str]:
    """What was to be replaced and was not: it is still the checkpoint of its name."""
    return {
        left: name
        for left, name, kind in _left_in(folder)
        if kind == "replaced" and not (folder / name).exists()
    }


def _left_in(folder: Path) -> Iterator[tuple[Path, str, str]]:
    for path in _entries(folder):
        if match := _LEFT.fullmatch(path.name):
            yield path, match["name"], match["kind"]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _names_of(folder: Path) -> contextlib.AbstractContextManager[None]:
    """See [Note: Saves beside each other]."""
    return _locked(folder, fcntl.LOCK_EX)


@contextlib.contextmanager
def _locked(folder: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _nobody_writes(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        warnings.warn(
            f"lowtide: save: {folder}: expected a file system with locks, to know "
            f"whether somebody still writes there, got {error}. Remove the folder if "
            "nobody does.",
            stacklevel=2,
        )
        return False
    finally:
        os.close(descriptor)
    return True
