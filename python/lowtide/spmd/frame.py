"""The region that runs in this thread, and what its errors say."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from lowtide import _C
from lowtide._base import open_regions
from lowtide.spmd.axes import Axis, rank_text
from lowtide.spmd.replicas import Replicas
from lowtide.spmd.types import ReplicationError, error


class Frame:
    """One forward of a region."""

    def __init__(self, name: str, axes: tuple[Axis, ...], *, checks: bool) -> None:
        self.name = name
        self.axes = axes
        self.checks = checks
        self.record = _C.RegionRecord()
        self.replicas: Replicas | None = None
        self._pauses = 0

    @property
    def looks(self) -> bool:
        return self.checks and not self._pauses and current() is self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not the region's."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def axis_named(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def add_value(
        self, tensor: torch.Tensor, types: Mapping[str, str], label: str, where: str
    ) -> None:
        if self.replicas is not None:
            with self.paused():
                self.replicas.add(tensor, types, label, where)

    def fail(self, expected: str, got: str, next_step: str) -> ReplicationError:
        return error(
            f"region {self.name!r}", expected, f"{got} {rank_text()}", next_step
        )

    # Collectives that were seen.

    def _axis_over(self, group_name: str) -> Axis | None:
        """The axis a group's ranks lie along, or None; also for groups a user made."""
        for axis in self.axes:
            if axis.group_name == group_name:
                return axis if axis.size > 1 else None
        group = _resolve_process_group(GroupName(group_name))
        ranks = set(dist.get_process_group_ranks(group))
        for axis in self.axes:
            if len(ranks & set(dist.get_process_group_ranks(axis.group))) > 1:
                return axis
        return None

    def _over(self, finding: _C.CollectiveFinding) -> str | None:
        """ "over 'tp'", or None for a group that is no axis of this region."""
        if not finding.group:
            return "over an unknown group"
        axis = self._axis_over(finding.group)
        return None if axis is None else f"over {axis}"

    def _seen(
        self, findings: Sequence[_C.CollectiveFinding]
    ) -> list[tuple[str, _C.CollectiveFinding]]:
        return [(o, f) for f in findings if (o := self._over(f)) is not None]

    def raise_for_operator(
        self, findings: Sequence[_C.CollectiveFinding], rule: str
    ) -> None:
        for over, found in self._seen(findings):
            raise self.fail(
                f"no collective in {found.op}, whose rule is {rule}",
                f"{_an(found.kind)} of {_value(found)} {over} at {found.where}",
                "Register COLLECTIVE(src, dst), or leave the call out.",
            )

    def raise_for_forward(self, findings: Sequence[_C.CollectiveFinding]) -> None:
        if not self.checks:
            return
        for over, found in self._seen(findings):
            raise self.fail(
                "typed collectives only",
                f"{_an(found.kind)} of {_value(found)} {over} in forward",
                "Use those of lowtide.spmd, or an operator with a COLLECTIVE rule.",
            )

    def raise_for_backward(self, findings: Sequence[_C.CollectiveFinding]) -> None:
        seen = self._seen(findings)
        if not seen:
            return
        over, found = seen[0]
        more = f", and {len(seen) - 1} more" if len(seen) > 1 else ""
        at = f", called at {found.where}" if found.where else ""
        if found.missing:
            raise self.fail(
                f"one {found.kind} {over} in the backward of {found.op}{at}, as its "
                f"types require",
                f"none{more}",
                "Add it to that backward, or correct the types.",
            )
        raise self.fail(
            f"no {found.kind} {over} here in backward, as the types require none",
            f"one of {_value(found)} from the backward of {found.op}{at}{more}",
            "Leave it out of that backward; if the operator communicates, register "
            "COLLECTIVE(src, dst).",
        )

    def first_stale(self, node: Any) -> str | None:
        """Among the region's nodes from ``node`` on, "operator at line" of one whose
        saved tensor was written to."""
        pending, known = [node], set()
        while pending:
            node = pending.pop()
            if node is None or node in known:
                continue
            known.add(node)
            place = self.record.place(node._sequence_nr())
            if place is None:
                continue
            if _is_stale(node):
                return "{} at {}".format(*place) if place[1] else node.name()
            pending += [following for following, _ in node.next_functions]
        return None


def _is_stale(node: Any) -> bool:
    names = [name for name in dir(node) if name.startswith("_saved_")]
    for name in [*names, "saved_tensors"]:
        try:
            getattr(node, name, None)
        except RuntimeError as failure:
            if "modified by an inplace operation" in str(failure):
                return True
    return False


def _value(finding: _C.CollectiveFinding) -> str:
    return f"{finding.value} ({finding.bytes} B)"


def _an(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_stack = _Stack()


def current() -> Frame | None:
    return _stack.frames[-1] if _stack.frames else None


def push(frame: Frame) -> None:
    _stack.frames.append(frame)
    open_regions.enter(frame.name)


def pop(frame: Frame) -> None:
    assert _stack.frames.pop() is frame
    open_regions.leave()
