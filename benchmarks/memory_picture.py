"""Draws docs/memory.svg from the stored figures of memory_llama: peak reserved of
lowtide and FSDP2 in every setting.

    python benchmarks/memory_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path
from xml.sax.saxutils import escape

BENCHMARKS = Path(__file__).resolve().parent
RESULT = BENCHMARKS / "results" / "memory_llama.json"
PICTURE = BENCHMARKS.parent / "docs" / "memory.svg"
SYSTEMS = {"fsdp2": ("FSDP2", "#bbbbbb"), "lowtide": ("lowtide", "#4477aa")}
BEGIN, END = "reserved, ", ", best loss"
LEFT, WIDTH, ROW = 400, 420, 42
STYLE = 'font-family="sans-serif" font-size="13"'

Bars = dict[str, dict[str, float]]  # setting -> system -> GiB


def figures(path: Path) -> Bars:
    found: Bars = {}
    for row in json.loads(path.read_text())["rows"]:
        quantity = row["quantity"]
        if quantity.startswith(BEGIN) and quantity.endswith(END):
            setting = quantity[len(BEGIN) : -len(END)]
            found.setdefault(setting, {})[row["system"]] = row["value"]
    return found


def draw(seen: Bars) -> str:
    scale = WIDTH / max(value for bars in seen.values() for value in bars.values())
    height = 50 + ROW * len(seen)
    names = " and ".join(
        f'<tspan fill="{color}">{name}</tspan>' for name, color in SYSTEMS.values()
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 70}" '
        f'height="{height}" {STYLE}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22">peak reserved, GiB, simulated: {names}, each with '
        "its best loss</text>",
    ]
    for place, (setting, bars) in enumerate(seen.items()):
        top = 36 + ROW * place
        lines.append(
            f'<text x="{LEFT - 10}" y="{top + 20}" text-anchor="end">'
            f"{escape(setting)}</text>"
        )
        for offset, (system, (_, color)) in zip((0, 16), SYSTEMS.items(), strict=True):
            y, length = top + offset, bars[system] * scale
            lines += [
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="14" '
                f'fill="{color}"/>',
                f'<text x="{LEFT + length + 6:.1f}" y="{y + 12}">'
                f"{bars[system]:.2f}</text>",
            ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(figures(RESULT)))
