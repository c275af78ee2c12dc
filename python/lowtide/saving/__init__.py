"""``lowtide.save`` and ``lowtide.load``: checkpoints that are whole or not there."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from lowtide._sharding import stepped
from lowtide.saving import (
    background,
    checksums,
    commit,
    content,
    folders,
    staging,
    verification,
)
from lowtide.saving.background import Saving, Snapshot
from lowtide.saving.content import Optimizers
from lowtide.saving.errors import CheckpointError
from lowtide.saving.planners import LoadPlanner, SavePlanner
from lowtide.saving.ranks import Ranks
from lowtide.saving.reader import Reader, classes_of
from lowtide.saving.writer import Writer

__all__ = ["CheckpointError", "Saving", "load", "save"]


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int | None = None,
    in_background: bool = False,
    snapshot_bytes: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Saving | None:
    """Saves a training run to the folder ``path``: a distributed checkpoint that any
    reader of ``torch.distributed.checkpoint`` loads, and a manifest with checksums of
    every file and tensor. It is there whole, or not at all: written aside, and given
    its name by one rename when all ranks have it on storage. Collective.

    The model's state, the optimizer's, ``.grad`` of parameters that have one (so call
    ``zero_grad`` before, unless gradients are being accumulated), gradients accumulated
    without sync and this rank's random number generators of torch's are in it.

    Args:
        path: A folder that all ranks see. A checkpoint that is there is replaced.
        optimizer: One or several, of ``model.parameters()`` or
            :func:`lowtide.local_parameters`.
        extra: What else is to be found again: tensors, numbers, strings and containers
            of these, such as ``scheduler.state_dict()``. What differs between ranks
            needs a key of its own for each; of others any rank's is saved.
        keep: Remove all but so many older checkpoints of lowtide's in the folder that
            ``path`` is in, once this one is there.
        in_background: Return when a snapshot has been taken, into page-locked memory
            on a stream of its own; a thread writes it. The next save or load waits
            for it. Parameters must not be written before the next optimizer step but
            by it.
        snapshot_bytes: The most host memory that the snapshot of a rank may take.
            Where any rank's needs more, the save is not in the background, with a
            warning.
        process_group: The ranks that save, by default all.

    Returns:
        With ``in_background`` what to wait on, else None.

    Raises:
        CheckpointError: On every rank; what was saved before is as it was.
        ValueError: For what can not be saved.
    """
    who = "save"
    final = Path(os.path.abspath(path))
    _require_count(keep)
    ranks = Ranks(process_group)
    background.wait_for_pending()
    with content.live(model, optimizer) as live:
        state: dict[str, Any] = {}

        def collect() -> tuple[list[Any], int, str]:
            state.update(content.collect(live, extra or {}, ranks.rank))
            groups = state.get(content.OPTIMIZER, {}).get("param_groups", [])
            parameters = [g["params"] for g in groups]
            return parameters, background.bytes_of(state), checksums.best()

        everyone = ranks.gather(who, collect)
        if any(groups != everyone[0][0] for groups, *_ in everyone):
            raise CheckpointError(
                "lowtide: save: expected the same parameters in the optimizers of all "
                "ranks, got different ones: they train different modules. Save each "
                "to a path of its own, with process_group."
            )
        needed = max(size for _, size, _ in everyone)
        algorithm = checksums.common(best for *_, best in everyone)
        if in_background and snapshot_bytes is not None and needed > snapshot_bytes:
            in_background = False
            warnings.warn(
                f"lowtide: save: expected a snapshot of at most {snapshot_bytes} bytes "
                f"a rank, got {needed}: the step waits for this save. Allow more.",
                stacklevel=2,
            )
        if not in_background:
            _write(final, state, ranks, keep, algorithm)
            return None
        snapshot = Snapshot(state, live.device)

    def write() -> None:
        snapshot.wait()
        _write(final, snapshot.state, ranks, keep, algorithm)

    return background.start(write)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Loads what :func:`save` saved into ``model`` and ``optimizer``, on any number of
    ranks and any mesh. Collective.

    Everything is verified before anything is changed: checksums of all bytes, names,
    shapes and dtypes. This rank's part is then read into host memory, as many bytes as
    the model's, the optimizer's and gradients' shards have, and written to them in
    place; where a rank fails even then, all write back what was there. Gradients
    accumulated without sync need as many ranks and the mesh that saved them; random
    number generators as many ranks, else they stay as they are, with a warning.

    A checkpoint of ``torch.distributed.checkpoint.save`` loads as well, with a warning
    that nothing vouches for its bytes. Nothing is unpickled but tensors, plain values
    and containers, in no checkpoint.

    Args:
        path: What was saved to, or a folder of checkpoints, for the newest in it.
        optimizer: None leaves an optimizer's state in the checkpoint alone.

    Returns:
        ``extra``; of a checkpoint of torch's the objects beside model and optimizer.

    Raises:
        CheckpointError: On every rank, naming the file and the tensor; the model and
            the optimizer are as they were.
    """
    who = "load"
    ranks = Ranks(process_group)
    background.wait_for_pending()
    folder = ranks.first(who, lambda: folders.find(Path(path).absolute()))
    opened = ranks.run(who, lambda: verification.open_checkpoint(folder))
    ranks.run(who, lambda: verification.verify(opened, ranks.rank, ranks.size))
    with content.live(model, optimizer) as live:
        staged = ranks.run(
            who, lambda: staging.stage(opened, live, ranks.rank, ranks.size)
        )
        with _as_ours(who, ranks), classes_of(live):
            dcp.load(
                staged.values,
                storage_reader=Reader(opened),
                planner=LoadPlanner(opened.where, staged.new),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        extra = ranks.run(who, lambda: _extra(staged, opened))
        _commit(who, staged, opened, live, ranks)
    saved_by = opened.manifest.world_size if opened.manifest else ranks.size
    if saved_by != ranks.size:
        warnings.warn(
            f"lowtide: load: {folder}: expected the {saved_by} ranks that saved it, "
            f"got {ranks.size}: random number generators stay as they are. Seed them.",
            stacklevel=2,
        )
    return extra


def _write(
    final: Path,
    state: Mapping[str, Any],
    ranks: Ranks,
    keep: int | None,
    algorithm: str,
) -> None:
    who = "save"
    with contextlib.ExitStack() as stack:
        aside = ranks.first(who, lambda: stack.enter_context(folders.aside(final)))
        of_rank_0 = aside if ranks.rank == 0 else None
        with _as_ours(who, ranks):
            dcp.save(
                dict(state),
                storage_writer=Writer(aside.path, of_rank_0, ranks.size, algorithm),
                planner=SavePlanner(),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    if keep is not None:
        ranks.first(who, lambda: _remove_old(final, keep))


def _remove_old(final: Path, keep: int) -> None:
    try:
        folders.keep(final, keep)
    except OSError as error:  # the checkpoint is there all the same
        warnings.warn(
            f"lowtide: save: expected to remove old checkpoints beside {final}, got "
            f"{error}. Remove them, or look at the folder's permissions.",
            stacklevel=2,
        )


@contextlib.contextmanager
def _as_ours(who: str, ranks: Ranks) -> Iterator[None]:
    """What torch raises, on all ranks or because one has ended."""
    try:
        with warnings.catch_warnings():
            if ranks.group is None:  # one process, which is no mistake
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise ranks.explained(who, error) from error
    except RuntimeError as error:  # of the process group
        raise ranks.gone(who, error) from error


def _commit(
    who: str,
    staged: staging.Staged,
    opened: verification.Opened,
    live: content.Live,
    ranks: Ranks,
) -> None:
    changes = ranks.run(who, lambda: commit.changes(staged, opened, live))
    replace_step = ranks.run(who, lambda: commit.replace_step(staged, opened, live))
    begun: list[commit.Change] = []

    def make() -> None:
        for change in changes:
            begun.append(change)
            change.make()

    try:
        ranks.run(who, make)
        ranks.run(who, replace_step)
    except BaseException:
        for change in reversed(begun):
            change.undo()
        raise
    for optimizer in live.optimizers:
        stepped.loaded(optimizer)


def _extra(staged: staging.Staged, opened: verification.Opened) -> dict[str, Any]:
    nested = staged.nested(opened, staged.extra)
    return nested if opened.manifest is None else nested.get(content.EXTRA, {})


def _require_count(keep: int | None) -> None:
    if keep is not None and (type(keep) is not int or keep < 0):
        raise ValueError(
            f"lowtide: save: keep: expected a number of older checkpoints or None, got "
            f"{keep!r}. Pass 1 to keep the one before."
        )
