"""The recording for PyTorch's memory visualiser, with Python call stacks."""

import pickle
from pathlib import Path
from typing import Any

from lowtide.planning.analysis import Analysis


def write(
    analysis: Analysis,
    content: dict[str, Any],
    entries: list[dict[str, Any]],
    path: str | Path,
) -> None:
    """What ``torch.cuda.memory._dump_snapshot`` writes. ``entries``: those of
    ``content`` that belong to the device of the analysis."""
    lives = iter(analysis.lives)
    stacks = analysis.recorder.stacks
    frames: dict[int, list[dict[str, object]]] = {}
    for entry in entries:
        if entry["action"] != "alloc":
            continue
        life = next(lives)
        number = life.recorded.stack
        if number not in frames:
            frames[number] = [
                {"filename": line.file, "line": line.line, "name": line.function}
                for line in stacks.lines(number)
            ]
        about = f"{life.category} {life.name or life.module or ''}".rstrip()
        entry["frames"] = [
            {"filename": about, "line": 0, "name": life.recorded.operator},
            *frames[number],
        ]
        entry["user_metadata"] = about
    with open(path, "wb") as file:
        pickle.dump(content, file)
