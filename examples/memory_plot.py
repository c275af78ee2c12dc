"""A picture of who holds which bytes during a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MIB = 1 << 20

# From the bottom: what stays, then what comes and goes.
LAYERS = {
    "parameters": ("parameters (shards)", "#4e79a7"),
    "optimizer state": ("optimizer state (shards)", "#76a5cf"),
    "sharded_gradients": ("gradients (shards)", "#59a14f"),
    "gradient_slab": ("gradients before the reduction", "#8cd17d"),
    "gradient_stream": ("gradients on their way", "#b6992d"),
    "gather_input": ("shards being gathered", "#f1ce63"),
    "gathered": ("gathered parameters", "#e15759"),
    "activations": ("activations named by a policy", "#9c755f"),
    "other": ("other activations, temporaries", "#bab0ac"),
}


def save_step_memory(memory: dict[str, Any], title: str, path: Path) -> None:
    """`memory` is what `instruments.Memory` recorded."""
    unknown = memory["bytes"].keys() - LAYERS.keys()
    assert not unknown, f"no layer for {unknown}"
    names = [name for name in LAYERS if any(memory["bytes"].get(name, ()))]
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axes.stackplot(
        memory["milliseconds"],
        [[held / MIB for held in memory["bytes"][name]] for name in names],
        labels=[LAYERS[name][0] for name in names],
        colors=[LAYERS[name][1] for name in names],
        step="post",
    )
    peak = memory["peak_bytes"] / MIB
    axes.axhline(peak, color="black", linewidth=0.8, linestyle="--")
    axes.annotate(
        f"peak {peak:.1f} MiB",
        (1, peak),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
    )
    axes.set(
        title=title, xlabel="ms", ylabel="live MiB on rank 0", ylim=(0, peak * 1.1)
    )
    axes.set_xlim(0, memory["milliseconds"][-1])
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
