"""Results on disk: one JSON file per case."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from case import Case, Row


@dataclass(frozen=True)
class Result:
    case: str
    describe: str
    how: str
    headlines: tuple[str, ...]
    command: str
    environment: dict[str, Any]
    rows: tuple[Row, ...]


def of(case: Case, rows: Sequence[Row], environment: dict[str, Any]) -> Result:
    return Result(
        case=case.name,
        describe=case.describe,
        how=case.how,
        headlines=case.headlines,
        command=f"python benchmarks/run.py {case.name}",
        environment=environment,
        rows=tuple(rows),
    )


def write(result: Result, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result.case}.json"
    path.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return path


def read(path: Path) -> Result:
    fields = json.loads(path.read_text())
    fields["rows"] = tuple(Row(**row) for row in fields["rows"])
    fields["headlines"] = tuple(fields["headlines"])
    return Result(**fields)


def read_all(directory: Path, order: Sequence[str]) -> list[Result]:
    """Those present, in this order."""
    paths = [directory / f"{name}.json" for name in order]
    return [read(path) for path in paths if path.exists()]


def differences(stored: Result, rows: Iterable[Row]) -> list[str]:
    """Where ``rows``, some of those of its case computed again, are not what is
    stored."""
    known = {(row.system, row.quantity): row for row in stored.rows}
    return [
        f"{row.system}, {row.quantity}: expected {known_as(found)}, got {known_as(row)}"
        for row in rows
        if (found := known.get((row.system, row.quantity))) != row
    ]


def known_as(row: Row | None) -> str:
    if row is None:
        return "no such row"
    return f"{row.value} {row.unit} ({row.kind}; {row.note})"
