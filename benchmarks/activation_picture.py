"""Draws docs/activations.svg from the stored figures of case2_residual_offload: what
lives where for each policy.

    python benchmarks/activation_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
RESULT = BENCHMARKS / "results" / "case2_residual_offload.json"
PICTURE = BENCHMARKS.parent / "docs" / "activations.svg"
SYSTEMS = (
    ("nothing named", "ActivationPolicy()"),
    ("save hidden", 'save=["hidden"]'),
    ("offload hidden", 'offload=["hidden"]'),
    ("offload residual", 'offload=["residual"]'),
    ("offload both", 'offload=["residual", "hidden"]'),
    ("torch checkpoint, SAC MUST_CPU_OFFLOAD", "torch: SAC MUST_CPU_OFFLOAD"),
    ("torch checkpoint, save_on_cpu", "torch: save_on_cpu"),
)
DEVICE, HOST = "#4477aa", "#ddaa33"
LEFT, WIDTH, ROW = 230, 430, 44
STYLE = 'font-family="sans-serif" font-size="13"'


def figures() -> dict[str, tuple[float, float]]:
    """system -> (device, host), MiB held for backward."""
    rows = json.loads(RESULT.read_text())["rows"]
    by = {(row["system"], row["quantity"]): row["value"] for row in rows}
    return {
        system: (by[system, "device, held for backward"], by[system, "host"])
        for system, _ in SYSTEMS
    }


def draw(seen: dict[str, tuple[float, float]]) -> str:
    scale = WIDTH / max(max(pair) for pair in seen.values())
    height = 60 + ROW * len(SYSTEMS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 90}" '
        f'height="{height}" {STYLE}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22"><tspan fill="{DEVICE}">device</tspan> and '
        f'<tspan fill="{HOST}">host</tspan>, MiB held between forward and backward'
        "</text>",
    ]
    for place, (system, label) in enumerate(SYSTEMS):
        top = 40 + ROW * place
        text = label.replace('"', "&quot;")
        lines.append(
            f'<text x="{LEFT - 10}" y="{top + 21}" text-anchor="end">{text}</text>'
        )
        for offset, color, value in zip(
            (0, 16), (DEVICE, HOST), seen[system], strict=True
        ):
            y, length = top + offset, value * scale
            lines += [
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="14" '
                f'fill="{color}"/>',
                f'<text x="{LEFT + length + 6:.1f}" y="{y + 12}">{value:.0f}</text>',
            ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(figures()))
