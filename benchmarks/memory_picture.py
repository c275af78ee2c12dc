"""Draws docs/memory.svg from the stored figures of peers: what each sharding system
reserves for a step of an 8B Llama.

    python benchmarks/memory_picture.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

BENCHMARKS = Path(__file__).resolve().parent
RESULT = BENCHMARKS / "results" / "peers.json"
PICTURE = BENCHMARKS.parent / "docs" / "memory.svg"
BEGIN, END = "reserved, 8B, ", " ranks"
OURS, THEIRS, TEXT = "#2f6db3", "#8a8f98", "#1d2430"
LEFT, WIDTH, BAR, GAP = 230, 480, 20, 26
STYLE = f'font-family="sans-serif" font-size="13" fill="{TEXT}"'
GPU = 80  # GiB of an H100: what takes more is not drawn to scale

Bars = dict[str, dict[str, float]]  # ranks -> system -> GiB


def figures(path: Path) -> Bars:
    found: Bars = {}
    for row in json.loads(path.read_text())["rows"]:
        quantity = row["quantity"]
        if quantity.startswith(BEGIN) and row["value"] is not None:
            ranks = quantity.removeprefix(BEGIN).removesuffix(END)
            found.setdefault(ranks, {})[row["system"]] = row["value"]
    return found


def draw(bars: Bars) -> str:
    fitting = [v for group in bars.values() for v in group.values() if v <= GPU]
    scale = WIDTH / max(fitting)
    lines: list[str] = []
    top = 30
    for ranks, group in bars.items():
        lines.append(text(16, top + 14, f"{ranks} GPUs", weight="bold"))
        top += GAP
        for system, gib in sorted(group.items(), key=lambda item: item[1]):
            lines += bar(top, system, gib, scale)
            top += GAP
        top += 12
    return "\n".join(frame(lines, top)) + "\n"


def bar(top: int, system: str, gib: float, scale: float) -> Iterator[str]:
    yield text(LEFT - 8, top + 15, system, anchor="end")
    if gib > GPU:
        yield text(LEFT, top + 15, f"{gib:.0f} GiB: more than an H100 has")
        return
    colour = OURS if system.startswith("lowtide") else THEIRS
    length = gib * scale
    yield (
        f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR}" '
        f'fill="{colour}"/>'
    )
    yield text(LEFT + length + 6, top + 15, f"{gib:.1f}")


def text(
    x: float, y: float, words: str, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def frame(lines: Sequence[str], height: int) -> Iterator[str]:
    title = "Peak reserved GPU memory of a training step, Llama 3 8B, GiB (simulated)"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 60}" '
        f'height="{height}" {STYLE}>'
    )
    yield '<rect width="100%" height="100%" fill="white"/>'
    yield text(16, 18, title)
    yield from lines
    yield "</svg>"


if __name__ == "__main__":
    PICTURE.write_text(draw(figures(RESULT)))
