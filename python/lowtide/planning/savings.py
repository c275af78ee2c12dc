"""What would lower the peak most.

Every figure is arithmetic: the allocations that would go, or a fraction of each, are
taken out of the recorded run, and its peak is looked for again. What a change would add
elsewhere is left out unless it is said here.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from lowtide.phantom.clock import StepTime
from lowtide.planning.analysis import Analysis, Life
from lowtide.planning.report import Saving

_LOSS_CHUNKS = 8
_LEAST = 0.01  # of the peak
_BLOCK = re.compile(r"^(.*?)\b(\d+)(?=\.|$)")

Fractions = list[tuple[Life, float]]  # how much of each allocation would go


def savings_of(
    analysis: Analysis, world: int, step_time: StepTime | None
) -> list[Saving]:
    """The largest first."""
    peak = analysis.peak()
    live = analysis.live_at(peak)
    found = [
        _saving(analysis, what, *proposal)
        for what, propose in _PROPOSALS.items()
        if (proposal := propose(analysis, live, world)) is not None
    ]
    found = [s for s in found if s.allocated > _LEAST * analysis.allocated[peak]]
    found.sort(key=lambda saving: -saving.allocated)
    if step_time is not None:
        found = [_with_link(saving, analysis, step_time) for saving in found]
    return [*found, *_other_allocator(analysis)]


def _saving(analysis: Analysis, what: str, advice: str, gone: Fractions) -> Saving:
    less = [0.0] * (len(analysis.allocated) + 1)
    for life, fraction in gone:
        less[life.begin] += fraction * life.block
        less[life.end] -= fraction * life.block
    total, best = 0.0, 0.0
    for place, allocated in enumerate(analysis.allocated):
        total += less[place]
        best = max(best, allocated - total)
    saved = int(analysis.allocated[analysis.peak()] - best)
    return Saving(what, advice, saved, None, "arithmetic")


def _with_link(saving: Saving, analysis: Analysis, step_time: StepTime) -> Saving:
    """Says of an offload whether its copies out hide behind forward. In backward, which
    is longer, as many bytes come back."""
    forward = step_time.phases.get("forward")
    if saving.what != "offload" or forward is None or not forward.seconds:
        return saving
    step = analysis.steps()[-1]
    proposal = _offload(analysis, [], 1)
    assert proposal is not None
    moved = sum(share * x.block for x, share in proposal[1] if x.begin in step)
    needed = moved / forward.seconds / 1e9
    carried = step_time.assumptions["accelerator"]["host_bandwidth"] / 1e9
    verdict = "hidden" if needed <= carried else "compute would wait"
    advice = (
        f"{saving.advice}; copies at {needed:.1f} of the link's {carried:.1f} GB/s "
        f"while forward runs: {verdict}"
    )
    return dataclasses.replace(saving, advice=advice)


def _other_allocator(analysis: Analysis) -> Iterable[Saving]:
    """What an allocator with expandable segments makes of the requests."""
    settings = analysis.history.settings
    if settings.expandable:
        return
    again = analysis.history.replay(settings.with_expandable_segments(), None)
    saved = max(analysis.reserved) - again.reserved
    if again.fits and saved > _LEAST * max(analysis.reserved):
        advice = "PYTORCH_ALLOC_CONF=expandable_segments:True"
        yield Saving("expandable_segments", advice, 0, saved, "replayed")


# -- proposals -----------------------------------------------------------------------

Proposal = tuple[str, Fractions] | None


def _checkpoint(analysis: Analysis, live: list[Life], world: int) -> Proposal:
    """One input of each block stays, and one block is there again in backward."""
    inside = _by_block(analysis, _activations_at_the_worst(analysis))
    if not inside:
        return None
    all_bytes = sum(life.block for block in inside.values() for life in block)
    kept = sum(_input_bytes(path, block) for path, block in inside.items())
    again = max(sum(life.block for life in block) for block in inside.values())
    fraction = 1 - (kept + again) / all_bytes
    if fraction <= 0:
        return None
    # These are the whole run's, not only the moment's: less would be kept always.
    lives = [
        life
        for life in analysis.lives
        if life.category == "activations" and _block_of(life.module) in inside
    ]
    advice = f"checkpoint {_pattern(inside)} ({len(inside)} modules)"
    return advice, [(life, fraction) for life in lives]


def _offload(analysis: Analysis, live: list[Life], world: int) -> Proposal:
    """The inputs of checkpointed blocks, all but two on their way."""
    inside = _by_block(analysis, _activations_at_the_worst(analysis))
    single = {
        path: block for path, block in inside.items() if len(block) <= _FEW_TENSORS
    }
    if len(single) < 4 or len(single) < len(inside) / 2:
        return None
    fraction = 1 - 2 / len(single)
    lives = [
        life
        for life in analysis.lives
        if life.category == "activations" and _block_of(life.module) in single
    ]
    advice = f"offload the inputs of {_pattern(single)} (the residual) to the host"
    return advice, [(life, fraction) for life in lives]


_FEW_TENSORS = 3  # that a checkpointed block keeps


def _chunk_loss(analysis: Analysis, live: list[Life], world: int) -> Proposal:
    """Logits and what the loss makes of them, one chunk of tokens at a time."""
    largest = max((x.block for x in analysis.lives if _of_loss(x)), default=0)
    # The logits themselves, made by the head: as many elements, of 2 or 4 bytes.
    lives = [
        life
        for life in analysis.lives
        if life.category in _VALUES
        and largest // 2 <= life.block <= largest
        and (_of_loss(life) or _block_of(life.module) is None)
    ]
    advice = f"compute the loss in {_LOSS_CHUNKS} chunks of tokens, checkpointed"
    return (advice, [(life, 1 - 1 / _LOSS_CHUNKS) for life in lives]) if lives else None


_VALUES = {"activations", "temporaries", "recomputed", "backward_values"}


def _own_unit(analysis: Analysis, live: list[Life], world: int) -> Proposal:
    """For the first large parameter that is gathered together with another one."""
    for unit, parameters in _units(analysis).items():
        total = sum(numel for numel, _ in parameters)
        large = [(numel, name) for numel, name in parameters if numel > 0.2 * total]
        if len(large) < 2 or _block_of(unit) is not None:
            continue
        numel, name = large[0]
        gone = [
            (life, numel / total if life.recorded.lease else 1.0)
            for life in analysis.lives
            if life.category == "gathered_parameters"
            and life.name == (unit if life.recorded.lease else name)
        ]
        module = name.rpartition(".")[0]
        if module != unit:
            owner = unit or "the root"
            return f"make {module} a unit of its own, apart from {owner}", gone
    return None


def _units(analysis: Analysis) -> dict[str, list[tuple[int, str]]]:
    """(elements, name) of the parameters of each sharded unit."""
    modules = analysis.recorder.modules
    units = modules.units()
    result: dict[str, list[tuple[int, str]]] = {}
    for name, numel in modules.parameter_sizes().items():
        above = [u for u in units if u == "" or name.startswith(u + ".")]
        if above:
            result.setdefault(max(above, key=len), []).append((numel, name))
    return result


def _shard(analysis: Analysis, live: list[Life], world: int) -> Proposal:
    # Local parameters of lowtide's are tensors like others, in memory that it leased.
    leases = [life.recorded.lease for life in live]
    ours = any(lease is not None and lease[0] == "parameters" for lease in leases)
    if world == 1 or ours or analysis.recorder.sharded:
        return None
    held = ("parameters", "gradients", "optimizer_state")
    lives = [life for life in analysis.lives if life.category in held]
    advice = f"fully_shard the model over the {world} ranks"
    return advice, [(life, 1 - 1 / world) for life in lives]


_DDP = str(Path("torch", "nn", "parallel", "distributed.py"))


def _bucket_view(analysis: Analysis, live: list[Life], world: int) -> Proposal:
    """DDP's buckets, made when it wraps and again in the second forward, hold every
    gradient a second time."""
    buckets = [
        life
        for life in analysis.lives
        if life.category == "communication" and life.made_in.endswith(_DDP)
    ]
    advice = "DistributedDataParallel(..., gradient_as_bucket_view=True)"
    return (advice, [(life, 1.0) for life in buckets]) if buckets else None


def _synchronise(analysis: Analysis, live: list[Life], world: int) -> Proposal:
    """Gradients are kept whole while they wait for the last microbatch."""
    slabs = [
        life
        for life in analysis.lives
        if life.recorded.lease and life.recorded.lease[0] == "gradient_slab"
    ]
    advice = "reduce after every microbatch: set_requires_gradient_sync(True)"
    return (advice, [(life, 1 - 1 / world) for life in slabs]) if slabs else None


def _optimizer(analysis: Analysis, live: list[Life], world: int) -> Proposal:
    lives = [
        life
        for life in analysis.lives
        if life.recorded.in_optimizer and life.category == "temporaries"
    ]
    advice = "the optimizer's fused=True"
    return (advice, [(life, 1.0) for life in lives]) if lives else None


_PROPOSALS: dict[str, Callable[[Analysis, list[Life], int], Proposal]] = {
    "checkpoint": _checkpoint,
    "offload": _offload,
    "chunk_loss": _chunk_loss,
    "own_unit": _own_unit,
    "shard": _shard,
    "bucket_view": _bucket_view,
    "gradient_sync": _synchronise,
    "fused_optimizer": _optimizer,
}


# -- blocks --------------------------------------------------------------------------


def _activations_at_the_worst(analysis: Analysis) -> list[Life]:
    """The activations that are live when forward ends, when most of them are."""
    step = analysis.steps()[-1]
    change: dict[int, int] = {}
    for life in analysis.lives:
        if life.category == "activations" and life.begin in step:
            change[life.begin] = change.get(life.begin, 0) + life.block
            change[life.end] = change.get(life.end, 0) - life.block
    total = most = 0
    worst = step.start
    for place in sorted(change):
        total += change[place]
        if total > most:
            worst, most = place, total
    return [x for x in analysis.live_at(worst) if x.category == "activations"]


def _by_block(analysis: Analysis, lives: list[Life]) -> dict[str, list[Life]]:
    """What lives in each repeated block: a module with a number in its path."""
    result: dict[str, list[Life]] = {}
    for life in lives:
        block = _block_of(life.module)
        if block is not None:
            result.setdefault(block, []).append(life)
    return result


def _block_of(module: str | None) -> str | None:
    found = _BLOCK.search(module or "")
    return found[0] if found else None


def _pattern(blocks: Iterable[str]) -> str:
    return ", ".join(sorted({re.sub(r"\d+$", "*", block) for block in blocks}))


def _input_bytes(path: str, block: list[Life]) -> int:
    """A block's own values are sums with the residual: as large as its input."""
    own = [life.block for life in block if life.module == path]
    return min(own, default=max(life.block for life in block))


def _of_loss(life: Life) -> bool:
    return life.category in _VALUES and life.of_loss
