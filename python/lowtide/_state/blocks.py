"""Which modules of a model become units of their own, and the words for it."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lowtide.policies import MixedPrecisionPolicy

# An embedding or a head is worth a unit of its own from this part of a block's
# parameters on; without blocks, of the model's.
OWN_UNIT_SHARE = 0.25
OWN_UNIT_SHARE_OF_MODEL = 0.05


@dataclasses.dataclass(frozen=True)
class PlannedUnit:
    name: str  # fully qualified
    module: nn.Module
    why: str
    is_block: bool = False


@dataclasses.dataclass(frozen=True)
class Decision:
    units: list[PlannedUnit]  # in registration order
    notes: list[str]  # about what stays in the root's unit


def decide(model: nn.Module, ignored: set[nn.Parameter]) -> Decision:
    """Blocks, then what is large outside of them; see ``lowtide.wrap``."""
    units = list(_blocks(model, ignored))
    inside = {m for unit in units for m in unit.module.modules()}
    largest = max((_size(u.module, ignored) for u in units), default=0)
    least = (
        OWN_UNIT_SHARE * largest
        if largest
        else OWN_UNIT_SHARE_OF_MODEL * _size(model, ignored)
    )
    shared = _shared(model)
    notes = []
    for name, module in model.named_modules():
        if module in inside or not isinstance(module, nn.Embedding | nn.Linear):
            continue
        if module is model or _size(module, ignored) == 0:
            continue
        if any(parameter in shared for parameter in module.parameters()):
            continue
        if _size(module, ignored) >= least:
            kind = "embedding" if isinstance(module, nn.Embedding) else "linear layer"
            units.append(PlannedUnit(name, module, f"a large {kind} of its own"))
        else:
            notes.append(f"{name}: small beside a block")
    notes += [
        f"{' = '.join(names)}: tied, gathered once for all of them"
        for names in shared.values()
        if not _in_one_block(model, names, units)
    ]
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return Decision(sorted(units, key=lambda unit: order[unit.name]), notes)


def as_told(model: nn.Module, names: Sequence[str]) -> Decision:
    """The modules of these names, inner before outer."""
    modules = dict(model.named_modules())
    for name in names:
        _require_module(model, name, modules)
    inner_first = sorted(names, key=lambda name: -name.count("."))
    return Decision(
        [PlannedUnit(name, modules[name], "as you told") for name in inner_first], []
    )


def _require_module(model: nn.Module, name: str, modules: dict[str, nn.Module]) -> None:
    named = modules.get(name) if name else None
    if named is not None and not isinstance(named, nn.ModuleList | nn.ModuleDict):
        return
    can_be_units = [
        path
        for path, module in modules.items()
        if path and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    ]
    if named is not None:
        kind = f"a {type(named).__name__}, which has no forward"
        meant = [f"{name}.{child}" for child, _ in named.named_children()]
        advice = "Name the modules inside"
    else:
        kind = "which is none"
        meant = [path for path in can_be_units if fnmatchcase(path, name)]
        advice = "Write out each name" if meant else "It has"
    examples = ", ".join((meant or can_be_units)[:3])
    raise ValueError(
        f"lowtide: wrap: expected the names of modules of {type(model).__name__}, got "
        f"{name!r}, {kind}. {advice}, for example {examples}."
    )


def _blocks(module: nn.Module, ignored: set[nn.Parameter]) -> Iterator[PlannedUnit]:
    for path, container in _outermost_containers(module):
        seen: set[nn.Module] = set()
        for name, child in container.named_children():
            if _may_be_block(child, ignored) and child not in seen:
                seen.add(child)
                kind = type(child).__name__
                where = _join(path, name)
                yield PlannedUnit(where, child, f"a repeated {kind}", True)


def _outermost_containers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Lists and sequences that repeat a class, none inside another's block."""
    pending: list[tuple[str, nn.Module]] = [("", module)]
    while pending:
        path, here = pending.pop(0)
        if _repeats(here):
            yield path, here
            continue
        pending = [
            (_join(path, name), child) for name, child in here.named_children()
        ] + pending


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _repeats(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return False
    classes = Counter(
        type(child) for child in module.children() if _may_be_block(child, set())
    )
    return any(count > 1 for count in classes.values())


def _may_be_block(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    return (
        any(True for _ in module.children())
        and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        and _size(module, ignored) > 0
    )


def _size(module: nn.Module, ignored: set[nn.Parameter]) -> int:
    return sum(p.numel() for p in module.parameters() if p not in ignored)


def _shared(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Parameters with more than one name -> their names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {parameter: listed for parameter, listed in names.items() if listed[1:]}


def _in_one_block(
    model: nn.Module, parameters: list[str], units: list[PlannedUnit]
) -> bool:
    modules = {model.get_submodule(name.rpartition(".")[0]) for name in parameters}
    return any(modules <= set(unit.module.modules()) for unit in units)


# -- words --------------------------------------------------------------------------


def describe(
    model: nn.Module,
    decision: Decision,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
) -> str:
    """Before the model is sharded; counts are of full parameters."""
    dtypes = ", ".join(
        f"{what} {str(dtype).removeprefix('torch.')}"
        for what, dtype in (
            ("compute", policy.param_dtype),
            ("reduce", policy.reduce_dtype),
        )
        if dtype is not None
    )
    sizes = " x ".join(str(size) for size in mesh.mesh.shape)
    units = "unit" if not decision.units else "units"
    lines = [
        f"lowtide.wrap: {type(model).__name__}, {len(decision.units) + 1} {units} "
        f"over {sizes} ranks{'; ' + dtypes if dtypes else ''}"
    ]
    lines += [f"  {line}" for line in _unit_lines(decision.units)]
    in_units = {id(p) for unit in decision.units for p in unit.module.parameters()}
    rest = sum(p.numel() for p in model.parameters() if id(p) not in in_units)
    lines.append(f"  the root: {_count(rest)} parameters, gathered for a whole step")
    if not decision.units:
        lines.append("    no repeated blocks found: name modules with units=[...]")
    return "\n".join([*lines, *(f"    {note}" for note in decision.notes)])


def _unit_lines(units: Iterable[PlannedUnit]) -> Iterator[str]:
    """One for each run of equal blocks."""
    run: list[PlannedUnit] = []
    for unit in [*units, None]:
        if unit is not None and run and _alike(run[-1], unit):
            run.append(unit)
            continue
        if run:
            size = _count(_size(run[0].module, set()))
            if len(run) == 1:
                yield f"{run[0].name}: {run[0].why}, {size} parameters"
            else:
                yield (
                    f"{run[0].name} to {run[-1].name}: {len(run)} times "
                    f"{run[0].why}, {size} parameters each"
                )
        run = [unit] if unit is not None else []


def _alike(one: PlannedUnit, other: PlannedUnit) -> bool:
    return (
        one.why == other.why
        and one.name.rpartition(".")[0] == other.name.rpartition(".")[0]
        and _size(one.module, set()) == _size(other.module, set())
    )


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= 10 * size or (number >= size and unit != "k"):
            return f"{number / size:.1f}{unit}"
    return str(number)
