"""Peak memory of a training program, for any world size, without a GPU.

The program runs on the phantom device in a process of its own, where every allocation
is recorded with what it is for; :func:`plan` returns the figures.
"""

from lowtide.planning.ranks import RanksPlan, plan_ranks
from lowtide.planning.report import Moment, Plan, Saving, Tensors, Timeline
from lowtide.planning.run import PlanError, plan, plan_request, verify

__all__ = [
    "Moment",
    "Plan",
    "PlanError",
    "RanksPlan",
    "Saving",
    "Tensors",
    "Timeline",
    "plan",
    "plan_ranks",
    "plan_request",
    "verify",
]
