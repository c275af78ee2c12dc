"""Markdown from results: headlines for the README, all rows for the docs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from case import Row
from results import Result

BEGIN = "<!-- benchmarks:begin -->"
END = "<!-- benchmarks:end -->"
# Systems that every table shows first, in this order; others follow.
SYSTEMS = ("lowtide", "fsdp2")
TITLES = {"fsdp2": "FSDP2"}


def replace_region(text: str, content: str) -> str:
    """``text`` with ``content`` between the two markers."""
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"tables: expected the lines {BEGIN} and {END}, got neither.")
    return f"{before}{BEGIN}\n{content.strip()}\n{END}{after}"


def headlines(results: Sequence[Result]) -> str:
    """The quantities that each case names: lowtide beside FSDP2 in one table, a table
    of its own for a case with other systems; with its torch where that is not the
    newest of all."""
    pairs = ["| | lowtide | FSDP2 | ratio | |", "|---|--:|--:|--:|---|"]
    others: list[str] = []
    newest = max((torch_minor(result) for result in results), default=(0, 0))
    for result in results:
        minor = torch_minor(result)
        of_torch = "" if minor == newest else ", torch {}.{}".format(*minor)
        chosen = [
            replace(row, quantity=row.quantity + of_torch)
            for row in result.rows
            if row.quantity in result.headlines
        ]
        if {row.system for row in chosen} - set(SYSTEMS):
            others += [*unnoted(table(chosen)), ""]
        else:
            pairs += [pair(chosen, name + of_torch) for name in result.headlines]
    return "\n".join([*others, *pairs])


def torch_minor(result: Result) -> tuple[int, ...]:
    return tuple(map(int, result.environment["torch"].split(".")[:2]))


def pair(rows: Sequence[Row], quantity: str) -> str:
    by_system = {row.system: row for row in rows if row.quantity == quantity}
    ours, theirs = by_system["lowtide"], by_system.get("fsdp2")
    cells = [
        f"{quantity}{in_unit(ours)}",
        number(ours),
        number(theirs) if theirs else "",
        ratio(ours, theirs),
        " / ".join(dict.fromkeys(row.kind for row in by_system.values())),
    ]
    return f"| {' | '.join(cells)} |"


def unnoted(lines: Iterable[str]) -> Iterator[str]:
    """Without the notes below and the numbers that lead to them."""
    for line in lines:
        if line.startswith("|"):
            yield re.sub(r" \(\d+\)(?= \|)", "", line)


def everything(results: Sequence[Result]) -> str:
    return "\n\n".join("\n".join(section(result)) for result in results) + "\n"


def section(result: Result) -> Iterator[str]:
    yield f"## {result.case}"
    yield ""
    yield result.describe
    yield ""
    yield result.how.strip()
    yield ""
    yield f"`{result.command}`"
    yield ""
    yield from table(result.rows)
    yield ""
    yield obtained_with(result)


def obtained_with(result: Result) -> str:
    environment = ", ".join(f"{k} {v}" for k, v in result.environment.items())
    return f"Obtained with {environment}."


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each quantity, a column for each system; then the notes."""
    systems = columns(rows)
    titles = [TITLES.get(system, system) for system in systems]
    yield f"| | {' | '.join(titles)} | unit | kind |"
    yield f"|---|{'--:|' * len(systems)}---|---|"
    notes: dict[str, int] = {}
    for quantity in dict.fromkeys(row.quantity for row in rows):
        line = [row for row in rows if row.quantity == quantity]
        cells = {row.system: number(row) + mark(row, notes) for row in line}
        yield "| {} | {} | {} | {} |".format(
            quantity,
            " | ".join(cells.get(system, "") for system in systems),
            line[0].unit,
            ", ".join(dict.fromkeys(row.kind for row in line)),
        )
    if notes:
        yield ""
    yield from (f"{place}. {note}" for note, place in notes.items())


def columns(rows: Iterable[Row]) -> list[str]:
    present = list(dict.fromkeys(row.system for row in rows))
    first = [system for system in SYSTEMS if system in present]
    return first + [system for system in present if system not in first]


def mark(row: Row, notes: dict[str, int]) -> str:
    if not row.note:
        return ""
    return f" ({notes.setdefault(row.note, len(notes) + 1)})"


def in_unit(row: Row) -> str:
    return f", {row.unit}" if row.unit else ""


def number(row: Row) -> str:
    if row.value is None:
        return "-"
    if isinstance(row.value, bool):
        return "yes" if row.value else "no"
    if isinstance(row.value, int) or abs(row.value) >= 1000:
        return f"{row.value:,.0f}"
    return f"{row.value:,.4g}"


def ratio(ours: Row, theirs: Row | None) -> str:
    if theirs is None or not theirs.value or ours.value is None:
        return ""
    return f"{ours.value / theirs.value:.2f}"
