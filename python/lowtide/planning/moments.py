"""Which part of a step an allocation belongs to."""

from collections.abc import Callable, Sequence

from lowtide.planning.recording import Allocation

MOMENTS = ("setup", "forward", "loss", "backward", "optimizer")


def moments_of(
    allocations: Sequence[Allocation],
    step_ends: Sequence[int],
    is_loss: Callable[[Allocation], bool],
) -> list[str]:
    """One for every allocation, in order.

    The loss begins with the first call of a loss function, or with the first
    allocation after the last module of the forward, and lasts until backward.
    What follows backward and precedes the optimizer's step, clipping for instance,
    belongs to the optimizer.
    """
    leads_to_forward = _leads_to_forward(allocations, step_ends)
    ends = set(step_ends)
    result: list[str] = []
    moment = "setup"
    called = False  # a module, in this forward
    for place, allocation in enumerate(allocations):
        if place in ends:
            moment = "forward"
        if allocation.in_optimizer:
            moment = "optimizer"
        elif allocation.in_backward:
            moment = "backward"
        elif moment in ("backward", "optimizer"):
            moment = "forward" if leads_to_forward[place] else "optimizer"
        elif moment == "forward" and (
            is_loss(allocation)
            or (allocation.module is None and called and not leads_to_forward[place])
        ):
            moment = "loss"
        elif moment == "setup" and allocation.module is not None:
            moment = "forward"
        called = moment == "forward" and (called or allocation.module is not None)
        result.append(moment)
    return result


def _leads_to_forward(
    allocations: Sequence[Allocation], step_ends: Sequence[int]
) -> list[bool]:
    """Whether a module is called again before the optimizer."""
    ends = set(step_ends)
    result = [False] * len(allocations)
    leads = False
    for place in range(len(allocations) - 1, -1, -1):
        allocation = allocations[place]
        if place + 1 in ends or allocation.in_optimizer:
            leads = False
        elif allocation.in_backward:
            leads = False
        elif allocation.module is not None:
            leads = True
        result[place] = leads
    return result
