"""What a step that found no memory says, who held how much when it was refused, and
what is changed before it is tried again."""

import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide._activation.regions import regions
from lowtide._base.failures import text_of
from lowtide._base.memory import ledger
from lowtide.memory import CATEGORIES, human
from lowtide.saving.background import bytes_of

_MOST = 5  # holders that are named


def blame(
    device: torch.device, optimizers: Iterable[Optimizer], error: BaseException
) -> str:
    """Of what is held now: to be asked before the step is undone."""
    held: dict[str, int] = {
        CATEGORIES[name].holds: size
        for name, size in ledger(device).live().items()
        if name in CATEGORIES
    }
    held["optimizer states"] = bytes_of({"": [o.state for o in optimizers]})
    if device.type != "cpu":
        figures = torch.get_device_module(device).memory_stats(device)
        allocated = figures.get("allocated_bytes.all.current", 0)
        reserved = figures.get("reserved_bytes.all.current", 0)
        held["activations and what else the program holds"] = allocated - sum(
            held.values()
        )
        held["reserved by torch and not in use"] = reserved - allocated
    largest = sorted(held.items(), key=lambda row: -row[1])[:_MOST]
    named = ", ".join(f"{human(size)} {what}" for what, size in largest if size > 0)
    return (
        f"lowtide: step: expected memory for the step, got {text_of(error)!r}. It was "
        f"dropped; when it was refused there were {named or 'no bytes of lowtide'}. "
        "Save fewer activations, take smaller batches or more ranks; `lowtide plan` "
        "says what would lower the peak most."
    )


def give_back(device: torch.device) -> None:
    """What torch's allocator has reserved and nobody uses."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def offload_more(model: nn.Module) -> None:
    """What policies of activations let the device keep although they offload it of
    other regions: the same on all ranks, and no bit of the step is another."""
    changed = [state.module_name for _, state in regions(model) if state.offload_all()]
    if changed:
        warnings.warn(
            "lowtide: step: expected memory for the step with what keep_last of "
            f"ActivationPolicy keeps on the device, got none: {len(changed)} "
            f"checkpointed modules ({', '.join(sorted(set(changed)))}) offload it from "
            "now on. Lower keep_last.",
            stacklevel=2,
        )
