"""The slice of a Llama beside FSDP2: peak memory, bits, step time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import bars
import launch
from bars import row, with_bar
from case import Row
from figures import FLAGS, GIB, Figures, Programs, spread
from scale import Scale

CHECKPOINTS = ("full", "selective", "none")
# like for like, and with the loss that lowtide would take
LLAMA_SYSTEMS = ("fsdp2", "lowtide", "lowtide, vocabulary loss")


def llama_memory(checkpoint: str, scale: Scale, programs: Programs) -> Figures:
    keys, calls = [], []
    for segments in scale.segments:
        for system in LLAMA_SYSTEMS:
            keys.append((segments, system))
            calls.append((*memory_call(scale, checkpoint, system), *FLAGS[segments]))
    figures: Figures = {segments: {} for segments in scale.segments}
    for (segments, system), seen in zip(keys, programs.together(calls), strict=True):
        figures[segments][system] = steady(seen)
    return figures


def memory_call(scale: Scale, checkpoint: str, system: str) -> tuple[str, ...]:
    loss = "vocabulary" if "vocabulary" in system else scale.llama_loss
    return (
        *("llama_memory.py", *scale.llama, "--system", system.split(",")[0]),
        *("--loss", loss, "--checkpoint", checkpoint),
    )


def steady(seen: Figures) -> Figures:
    """Raises if the allocator had to give memory back, which lowers its peak."""
    if seen["retries"]:
        raise RuntimeError(
            f"llama_memory.py: expected a device that holds all, got {seen['retries']} "
            "allocations that had to be tried again. Is another program on this GPU?"
        )
    return seen["steady"]


def llama_memory_rows(checkpoint: str, figures: Figures) -> Iterator[Row]:
    for segments, seen in figures.items():
        setting = f"slice of 8B, 8 ranks, checkpoint {checkpoint}, {segments} segments"
        for kind in ("reserved", "allocated"):
            for system in LLAMA_SYSTEMS:
                value = seen[system][kind] / GIB
                yield row(system, f"{kind}, {setting}", value, "GiB", "measured")
        ours, theirs = seen["lowtide"], seen["fsdp2"]
        share = ours["reserved"] / theirs["reserved"]
        yield from with_bar(
            f"of FSDP2's reserved, {setting}", share, bars.OF_FSDP2_RESERVED
        )
        slack = ours["reserved"] / ours["allocated"]
        yield from with_bar(
            f"reserved / allocated, {setting}", slack, bars.RESERVED_OF_ALLOCATED
        )


# -- bits -----------------------------------------------------------------------------


def bits(scale: Scale, programs: Programs) -> Figures:
    return programs("bits.py", *scale.compared, "--loss", scale.llama_loss)


SHARING = (2, 30)  # of NCCL, from which on it is allowed
# Ranks and replicas (HSDP) that share the GPU. The order in which NCCL sums is its own
# from three ranks on: what FSDP2 itself does not repeat, nobody can.
SHARED = {"2 ranks": (2, 1), "4 ranks": (4, 1), "2 x 2 ranks": (4, 2)}


def ranks(scale: Scale, programs: Programs) -> Figures:
    """Several ranks on one GPU."""
    require_sharing()
    loss = ("--loss", scale.llama_loss)
    figures: Figures = {}
    for name, (world, replicas) in SHARED.items():
        options = ("--world", world, "--replicas", replicas, *loss)
        figures[name] = programs.ranks(world, "bits.py", *scale.ranks, *options)
    return figures


def require_sharing() -> None:
    import torch

    here = torch.cuda.nccl.version()
    if here < SHARING and launch.NCCL not in os.environ:
        raise RuntimeError(
            f"ranks: expected NCCL {'.'.join(map(str, SHARING))} or later, which lets "
            f"ranks share a GPU, got {'.'.join(map(str, here))} with this torch. Set "
            f"{launch.NCCL} to the file libnccl.so.2 of a later nvidia-nccl package."
        )


def ranks_rows(figures: Figures) -> Iterator[Row]:
    for name, seen in figures.items():
        for r in variants_rows(seen):
            yield replace(r, quantity=f"{r.quantity}, {name} on one GPU")


def graphs(scale: Scale, programs: Programs) -> Figures:
    """A program of its own: a capture that fails takes its device's work along."""
    options = (*scale.compared, "--loss", scale.llama_loss, "--captured")
    return programs("bits.py", *options)


def variants_rows(figures: Figures) -> Iterator[Row]:
    for variant, seen in figures["beside FSDP2"].items():
        for what, count in seen.items():
            quantity = f"{what} whose bits differ from FSDP2's, {variant}"
            system = "fsdp2" if variant.startswith("FSDP2") else "lowtide"
            yield from with_bar(quantity, count, bars.NONE, system=system)
    # Figures of before there was a check of it have none.
    for what, count in figures.get("Muon beside whole matrices", {}).items():
        quantity = f"elements of {what} whose bits differ from whole matrices', Muon"
        yield from with_bar(quantity, count, bars.NONE)


def bits_rows(figures: Figures) -> Iterator[Row]:
    yield from variants_rows(figures)
    errors = figures["gradient errors"]
    for mode, error in errors.items():
        yield row(mode, "error of a weight's gradient in bf16", error, "", "measured")
    beside = errors["fused"] / errors["exact"] if errors["exact"] else float("inf")
    quantity = "error of a fused gradient beside the exact mode's"
    yield from with_bar(quantity, beside, bars.NO_WORSE)
    for dtype, systems in figures.get("deferred errors", {}).items():
        for what, error in systems["lowtide"].items():
            quantity = f"error of {tensor_of(what)}, deferred logits in {dtype}"
            yield row("plain", quantity, systems["plain"][what], "", "measured")
            bar = bars.LOSS_ERROR if what == "loss" else bars.GRADIENT_ERROR[dtype]
            yield from with_bar(quantity, error, bar)


def tensor_of(what: str) -> str:
    return "the loss" if what == "loss" else f"the gradient of the {what}"


# -- step time ------------------------------------------------------------------------


def losses(scale: Scale) -> dict[str, str]:
    """Whose step is timed: the whole logits, and chunks of tokens."""
    return {"plain": "plain", "chunked": scale.llama_loss}


def llama_speed(loss: str, scale: Scale, programs: Programs) -> Figures:
    options = (*scale.llama, "--rounds", scale.rounds)
    return programs("llama_speed.py", *options, "--loss", loss)


def llama_speed_rows(loss: str, figures: Figures) -> Iterator[Row]:
    setting = f"slice of 8B, loss {loss}, one rank, NCCL"
    for system, ms in figures["ms"].items():
        yield row(system, f"step, {setting}", median(ms), "ms", "measured")
        rate = figures["flops"] / median(ms) / 1e9
        yield row(system, f"rate, {setting}", rate, "TFLOP/s", "measured")
    ratio = figures["ratio"]
    yield from with_bar(
        f"step time beside FSDP2's, {setting}",
        ratio["median"],
        bars.STEP_TIME,
        note=spread(ratio),
    )
