"""A picture of the bytes of a training step: who holds them, lowtide beside FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

MIB, GIB = 1 << 20, 1 << 30

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


# Of systems beside each other.
COLORS = ("#e15759", "#4e79a7", "#59a14f")


def save_memory(
    ours: dict[str, Any],
    fsdp2: dict[str, Any],
    title: str,
    plans: dict[str, dict[str, Any]],
    path: Path,
) -> None:
    """`ours`, `fsdp2`: what `instruments.Memory` recorded; `plans`: what
    `lowtide plan --json` wrote of a large model, by system; may be empty."""
    rows = 2 if plans else 1
    figure, axes = plt.subplots(
        rows, figsize=(9, 4.5 * rows), layout="constrained", squeeze=False
    )
    plot_step(axes[0, 0], ours, fsdp2, title)
    if plans:
        plot_plans(axes[1, 0], plans)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_step(
    axes: Axes, ours: dict[str, Any], fsdp2: dict[str, Any], title: str
) -> None:
    """Both steps from begin to end: each takes its own time."""
    unknown = ours["bytes"].keys() - LAYERS.keys()
    assert not unknown, f"no layer for {unknown}"
    names = [name for name in LAYERS if any(ours["bytes"].get(name, ()))]
    axes.stackplot(
        shares(ours["milliseconds"]),
        [[held / MIB for held in ours["bytes"][name]] for name in names],
        labels=[LAYERS[name][0] for name in names],
        colors=[LAYERS[name][1] for name in names],
        step="post",
    )
    totals = [sum(held) / MIB for held in zip(*fsdp2["bytes"].values(), strict=True)]
    axes.step(
        shares(fsdp2["milliseconds"]),
        totals,
        where="post",
        color="black",
        linewidth=0.9,
        label=f"FSDP2, all (peak {fsdp2['peak_bytes'] / MIB:.1f})",
    )
    peak = ours["peak_bytes"] / MIB
    axes.set(
        title=f"{title} (measured; peak {peak:.1f} MiB)",
        xlabel="share of the step",
        ylabel="live MiB on rank 0",
        xlim=(0, 1),
        ylim=(0, 1.1 * max(peak, fsdp2["peak_bytes"] / MIB)),
    )
    legend(axes)


def plot_plans(axes: Axes, plans: dict[str, dict[str, Any]]) -> None:
    for (name, plan), color in zip(plans.items(), COLORS, strict=False):
        timeline = plan["timeline"]
        columns = timeline["allocated"].values()
        totals = [sum(held) / GIB for held in zip(*columns, strict=True)]
        places = shares(range(len(totals)))
        axes.plot(places, totals, color=color, linewidth=1, label=f"{name}, allocated")
        axes.plot(
            places,
            [held / GIB for held in timeline["reserved"]],
            color=color,
            linestyle="--",
            label=f"{name}, reserved ({plan['peak_reserved'] / GIB:.1f})",
        )
    axes.set(
        title="Llama-3-8B on 8 H100s (simulated)",
        xlabel="share of the step's allocations",
        ylabel="GiB on rank 0",
        xlim=(0, 1),
        ylim=(0, None),
    )
    legend(axes)


def shares(places: Any) -> list[float]:
    """From 0 to 1."""
    return [place / (places[-1] or 1) for place in places]


def legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
    )
