"""Are two runs of train_bytes.py the same, and what did each cost?

A run is the content of its result file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

MIB = 1 << 20

LEGEND = """\
equal: to the unsharded reference, one process that plays both ranks
live: as c10 reports it during one step, with parameters and optimizer state
sent, calls: gloo's own in one step; it runs a reduce-scatter as an all_reduce
host: CPU time that sharding adds to a unit, forward and backward"""


def same_bits(whole: dict[str, Any], other: dict[str, Any]) -> bool:
    """The other run is a beginning of the whole one."""
    length = len(other["losses"])
    return (
        length > 0
        and whole["losses"][:length] == other["losses"]
        and all(whole["validations"][k] == v for k, v in other["validations"].items())
    )


def continues(whole: dict[str, Any], resumed: dict[str, Any]) -> bool:
    first = resumed["first_step"]
    checked = [k for k in resumed["validations"] if int(k) > first]
    return (
        0 < first < len(whole["losses"])
        and whole["losses"][first:] == resumed["losses"]
        and all(whole["validations"][k] == resumed["validations"][k] for k in checked)
    )


def table(runs: dict[str, dict[str, Any]], step: int) -> Table:
    """One column a run; figures are rank 0's unless the row says otherwise."""
    reference = runs["unsharded"]

    def loss(run: dict[str, Any], at: int) -> str:
        return f"{float.fromhex(run['validations'][str(at)]['loss']):.6f}"

    def equal_losses(run: dict[str, Any]) -> str:
        return yes_or_no(run["losses"][:step] == reference["losses"])

    def equal_parameters(run: dict[str, Any]) -> str:
        ours, theirs = (r["validations"][str(step)] for r in (run, reference))
        return yes_or_no(ours["parameters"] == theirs["parameters"])

    rows: dict[str, Callable[[dict[str, Any]], str]] = {}
    for rank in range(reference["num_ranks"]):
        rows[f"loss of step {step}, rank {rank}"] = lambda run, rank=rank: (
            f"{float.fromhex(run['losses'][step - 1][rank]):.6f}"
        )
    rows |= {
        "all losses equal, bit for bit": equal_losses,
        "parameters equal, bit for bit": equal_parameters,
        "validation loss before": lambda run: loss(run, 0),
        f"validation loss after step {step}": lambda run: loss(run, step),
        "peak live MiB": lambda run: f"{run['memory']['peak_bytes'] / MIB:.1f}",
        "MiB sent a step": lambda run: f"{run['traffic']['sent_bytes'] / MIB:.2f}",
    }
    for kind in sorted({k for run in runs.values() for k in run["traffic"]["calls"]}):
        rows[f"{kind} calls a step"] = lambda run, kind=kind: str(
            run["traffic"]["calls"].get(kind, 0)
        )
    rows |= {
        "host us per unit": lambda run: (
            f"{run['host_us']:.0f}" if "host_us" in run else "-"
        ),
        "tokens/s, all ranks": lambda run: f"{run['tokens_per_second']:,.0f}",
    }
    result = Table("", *runs)
    for name, cell in rows.items():
        result.add_row(name, *(cell(run) for run in runs.values()))
    return result


def yes_or_no(equal: bool) -> str:
    return "yes" if equal else "[bold red]NO[/]"
