"""What lowtide holds: bytes by category and unit, planned and observed.

Planned figures are the engine's arithmetic over the units' layouts (planned_step.h,
docs/design/memory.md); observed figures come from the ledger every buffer is leased
from.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from lowtide import _C
from lowtide._activation import report as activations
from lowtide._activation.regions import device_of
from lowtide._activation.report import ActivationReport
from lowtide._base.memory import ledger, offload_pool
from lowtide._sharding.unit import UnitState, units_of


@dataclasses.dataclass(frozen=True)
class Category:
    """A category of the ledger every buffer is leased from."""

    holds: str
    in_plans: str  # the category of `lowtide plan` that its bytes count in


# Categories by the ledger's names, in the order of the report.
CATEGORIES = {
    "parameters": Category("shards in the storage dtype", "parameters"),
    "gathered": Category("full parameters of the units in use", "gathered_parameters"),
    "gather_input": Category(
        "shards cast, or copied from the host, during a gather", "communication"
    ),
    "gradient_stream": Category(
        "ring of chunks on their way to the reduce-scatter", "communication"
    ),
    "gradient_slab": Category(
        "gradients accumulated without sync, or summed in place", "full_gradients"
    ),
    "sharded_gradients": Category("reduced gradients, what .grad shows", "gradients"),
    "activations": Category(
        "values copied or gathered back for backward", "activations"
    ),
}


@dataclasses.dataclass(frozen=True)
class CategoryBytes:
    """Bytes of one category on this rank."""

    live: int  # observed, now
    peak: int  # observed, since the last reset
    at_total_peak: int  # observed, when all categories together peaked
    planned: int  # arithmetic: the peak of a step with the present settings


@dataclasses.dataclass(frozen=True)
class FusedReport:
    """What ``grads="fused"`` made of the weights of linear layers."""

    fused: tuple[str, ...]  # weights whose gradients are summed in place
    exact: dict[str, str]  # weight -> why it is not, or which of its uses were not


@dataclasses.dataclass(frozen=True)
class HostReport:
    """What is on the host because of ``CPUOffloadPolicy``. Bytes, of all models of this
    process."""

    categories: dict[str, CategoryBytes]  # parameters and sharded_gradients
    pinned: int  # page-locked now, in use or kept for the next step
    pageable: int  # in use now: not page-locked, their copies block the host


@dataclasses.dataclass(frozen=True)
class DeviceReport:
    """The accelerator's memory as its driver and torch's allocator see it. Bytes."""

    total: int
    reserved: int  # by torch's allocator, for this process
    outside: int  # in use beyond that: the context, NCCL, libraries, other processes


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """``print`` it for a table; :meth:`to_dict` for machines. Bytes, this rank, this
    process: two models on one device share the observed figures."""

    device: str
    categories: dict[str, CategoryBytes]
    units: dict[str, dict[str, int]]  # unit -> bytes of each buffer when present
    total_live: int
    total_peak: int
    activations: ActivationReport | None = None  # of modules lowtide checkpoints
    fused: FusedReport | None = None  # of units with grads="fused"
    host: "HostReport | None" = None  # of units with CPUOffloadPolicy
    accelerator: DeviceReport | None = None  # None on CPUs
    # Parameters have left the device (``model.to("cpu")``): nothing is planned.
    is_away: bool = False

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def memory_report(model: nn.Module, *, reset_peaks: bool = False) -> MemoryReport:
    """The memory lowtide holds for ``model`` on this rank: for its units, and for what
    its checkpointed modules store, by name.

    ``reset_peaks``: afterwards peaks start again from what is live now, and the counts
    of names from zero.

    Raises ValueError if ``model`` has neither a unit nor a checkpointed module.
    """
    states = units_of(model.modules())
    activation_report = activations.activation_report(model)
    if not states and activation_report is None:
        raise ValueError(
            "lowtide: memory_report: expected a model sharded or checkpointed by "
            f"lowtide, got {type(model).__name__} without a unit or a checkpointed "
            "module. Call lowtide.fully_shard or lowtide.checkpoint first."
        )
    device = states[0].device if states else device_of(model)
    book = ledger(device)
    live, peak, at_peak = book.live(), book.peak(), book.at_total_peak()
    is_away = any(state.is_away for state in states)
    units = {} if is_away else {state: state.materialized() for state in states}
    planned = _C.planned_peaks(list(units.values()), _inside(list(units)))
    host = _host(states, planned, reset_peaks)
    planned["activations"] = activations.planned_bytes(model)
    report = MemoryReport(
        device=str(device),
        categories={
            name: CategoryBytes(live[name], peak[name], at_peak[name], planned[name])
            for name in CATEGORIES
        },
        units={state.name: unit.plan() for state, unit in units.items()},
        total_live=book.total_live,
        total_peak=book.total_peak,
        activations=activation_report,
        fused=_fused(states),
        host=host,
        accelerator=_accelerator(device),
        is_away=is_away,
    )
    if reset_peaks:
        book.reset_peaks()
        activations.reset(model)
    return report


def _accelerator(device: torch.device) -> DeviceReport | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return DeviceReport(total, reserved, total - free - reserved)


def _host(
    states: list[UnitState], planned: dict[str, int], reset_peaks: bool
) -> HostReport | None:
    if not any(state.settings.host for state in states):
        return None
    pool = offload_pool(states[0].device)
    live, peak, at_peak = (
        pool.ledger.live(),
        pool.ledger.peak(),
        pool.ledger.at_total_peak(),
    )
    rows = {"parameters": "host_parameters", "sharded_gradients": "host_gradients"}
    report = HostReport(
        categories={
            name: CategoryBytes(live[name], peak[name], at_peak[name], planned[row])
            for name, row in rows.items()
        },
        pinned=pool.figures()["pinned_bytes"],
        pageable=pool.figures()["pageable_bytes"],
    )
    if reset_peaks:
        pool.ledger.reset_peaks()
    return report


def _fused(states: list[UnitState]) -> FusedReport | None:
    reports = [state.fused.report() for state in states if state.fused is not None]
    if not reports:
        return None
    fused = tuple(name for names, _ in reports for name in names)
    exact = {name: why for _, reasons in reports for name, why in reasons.items()}
    return FusedReport(fused, exact)


def _inside(states: list[UnitState]) -> list[int]:
    """The number of the unit whose forward each one's own runs in; -1 for none."""
    below = [{m for top in state.modules for m in top.modules()} for state in states]
    running: list[int] = []
    found = []
    for number, state in enumerate(states):
        while running and state.modules[0] not in below[running[-1]]:
            running.pop()
        found.append(running[-1] if running else -1)
        running.append(number)
    return found


def _rows(categories: dict[str, CategoryBytes]) -> Iterator[str]:
    for name, row in categories.items():
        figures = (row.live, row.peak, row.at_total_peak, row.planned)
        columns = "".join(f"{human(figure):>12}" for figure in figures)
        yield f"{name:<18}{columns}  {CATEGORIES[name].holds}"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human(num_bytes: int) -> str:
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.2f} {_UNITS[unit]}"


def _lines(report: MemoryReport) -> Iterator[str]:
    yield f"lowtide memory on {report.device} (this rank)"
    yield f"{'category':<18}{'live':>12}{'peak':>12}{'at peak':>12}{'planned':>12}"
    yield from _rows(report.categories)
    yield f"{'total':<18}{human(report.total_live):>12}{human(report.total_peak):>12}"
    none = ", none of parameters that have left the device" if report.is_away else ""
    yield (
        "live, peak: observed by the ledger, of every model here; "
        f"planned: arithmetic, of this one{none}"
    )
    if report.accelerator is not None:
        found = report.accelerator
        yield (
            f"of {human(found.total)}: {human(found.reserved)} reserved by torch, "
            f"{human(found.outside)} outside (context, NCCL, other processes)"
        )
    if report.host is not None:
        yield (
            f"offloaded to the host: {human(report.host.pinned)} page-locked, "
            f"{human(report.host.pageable)} pageable"
        )
        yield from _rows(report.host.categories)
    if report.fused is not None:
        fused, exact = report.fused.fused, report.fused.exact
        left = sum(name not in fused for name in exact)
        yield f"weight gradients: {len(fused)} fused, {left} exact"
        yield from (f"  {name}: {why}" for name, why in exact.items())
    if report.activations is not None:
        yield from activations.lines(report.activations, human)
