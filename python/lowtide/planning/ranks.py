"""Plans of several ranks of a world, and whether they would wait for each other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lowtide.phantom.dry.call_logs import Log
from lowtide.phantom.dry.comparison import Verdict
from lowtide.phantom.dry.ranks import run_each
from lowtide.planning.report import Plan
from lowtide.planning.request import Request
from lowtide.planning.run import PlanError, plan_request


@dataclasses.dataclass(frozen=True)
class RanksPlan:
    """By rank: those that trained and those that failed. ``verdict``: of what all
    asked of NCCL, as far as they came."""

    plans: dict[int, Plan]
    errors: dict[int, PlanError]
    verdict: Verdict

    def notes(self) -> list[str]:
        """The notes of the first rank, and what others say beside."""
        found: dict[str, str] = {}
        for number, (rank, plan) in enumerate(self.plans.items()):
            for note in plan.notes:
                found.setdefault(note, f"rank {rank}: {note}" if number else note)
        return list(found.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": {str(rank): plan.to_dict() for rank, plan in self.plans.items()},
            "errors": {str(rank): str(error) for rank, error in self.errors.items()},
            "nccl": self.verdict.to_dict(),
        }

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def plan_ranks(
    request: Request,
    ranks: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> RanksPlan:
    """Does :func:`plan_request` for each of ``ranks``; ``lowtide.phantom.dry.ranks``
    says how many run at once. ``progress`` hears of each that is done."""
    asked: dict[int, dict[str, Any]] = {}
    failed: dict[int, PlanError] = {}

    def plan_one(rank: int, port: int | None) -> Plan | None:
        of_rank = dataclasses.replace(request, rank=rank, port=port, calls=True)

        def hear_calls(calls: dict[str, Any]) -> None:
            asked[rank] = calls

        try:
            return plan_request(of_rank, hear_calls=hear_calls)
        except PlanError as error:
            failed[rank] = error
            return None
        finally:
            progress()

    planned = run_each(ranks, request.world, plan_one)
    plans = {rank: plan for rank, plan in planned.items() if plan is not None}
    errors = {rank: failed[rank] for rank in sorted(failed)}
    logs = [
        Log.of(rank, calls, complete=rank in plans) for rank, calls in asked.items()
    ]
    return RanksPlan(plans, errors, Verdict.of(logs))
