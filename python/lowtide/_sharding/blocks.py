"""Which modules of a model become units of their own, and the words for it."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

# An embedding or a head is worth a unit of its own from this part of a block's
# parameters on; without blocks, of the model's.
OWN_UNIT_SHARE = 0.25
OWN_UNIT_SHARE_OF_MODEL = 0.05
# Alternatives that hold more of the model than this are searched for blocks.
ALTERNATIVES_SHARE = 0.5


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
    alternatives = _alternatives(model)
    of_alternatives = sum(_size(module, ignored) for module in alternatives)
    search_them = of_alternatives > ALTERNATIVES_SHARE * _size(model, ignored)
    units = list(_blocks(model, ignored, alternatives, search_them))
    inside = {m for unit in units for m in unit.module.modules()}
    whole = [m for m in alternatives if inside.isdisjoint(m.modules())]
    inside |= {m for module in alternatives for m in module.modules()}
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
        if _parent_reads_weight(model, name):
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
    notes += [
        f"{alternatives[module]}: one of several {type(module).__name__}, of which a "
        "step may run some"
        for module in whole
        if _size(module, ignored) >= least
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
    if named is not None and _has_forward(named):
        return
    can_be_units = [
        path for path, module in modules.items() if path and _has_forward(module)
    ]
    if named is not None:
        kind = f"a {type(named).__name__}, which has no forward"
        meant = list(_callable_inside(named, name))
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


def _has_forward(module: nn.Module) -> bool:
    """Whether anybody can call it: nothing would gather the others."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _callable_inside(module: nn.Module, path: str) -> Iterator[str]:
    for name, child in module.named_children():
        if _has_forward(child):
            yield _join(path, name)
        else:
            yield from _callable_inside(child, _join(path, name))


def _parent_reads_weight(model: nn.Module, name: str) -> bool:
    """The parent hands it to an operator and never calls the module."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return isinstance(parent, nn.MultiheadAttention)


def _alternatives(model: nn.Module) -> dict[nn.Module, str]:
    """Modules of one class under names of their own, as the heads of several tasks: a
    step may run some of them, and another rank others."""
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleDict) or _has_forward(module):
            continue
        of_class = Counter(type(child) for child in module.children())
        for name, child in module.named_children():
            # Numbers are places in a sequence, tables of several features all read.
            several = of_class[type(child)] > 1 and len(_stems(module)) > 1
            if several and _has_forward(child) and not isinstance(child, nn.Embedding):
                found[child] = _join(path, name)
    return found


def _stems(names: Iterable[str]) -> set[str]:
    return {
        name.rstrip("0123456789") if name[-1:].isdecimal() else name for name in names
    }


def _blocks(
    model: nn.Module,
    ignored: set[nn.Parameter],
    alternatives: dict[nn.Module, str],
    search_them: bool,
) -> Iterator[PlannedUnit]:
    for path, container in _outermost_containers(model, alternatives, search_them):
        seen: set[nn.Module] = set()
        for name, child in container.named_children():
            if child in alternatives or child in seen:
                continue
            if _may_be_block(child, ignored):
                seen.add(child)
                kind = type(child).__name__
                where = _join(path, name)
                yield PlannedUnit(where, child, f"a repeated {kind}", True)


def _outermost_containers(
    model: nn.Module, alternatives: dict[nn.Module, str], search_them: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Lists and sequences that repeat a class, none inside another's block."""
    pending: list[tuple[str, nn.Module]] = [("", model)]
    while pending:
        path, here = pending.pop(0)
        if here in alternatives and not search_them:
            continue
        if _repeats(here, alternatives):
            yield path, here
            continue
        pending = [
            (_join(path, name), child) for name, child in here.named_children()
        ] + pending


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _repeats(module: nn.Module, alternatives: dict[nn.Module, str]) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return False
    classes = Counter(
        type(child)
        for child in module.children()
        if child not in alternatives and _may_be_block(child, set())
    )
    return any(count > 1 for count in classes.values())


def _may_be_block(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    return (
        any(True for _ in module.children())
        and _has_forward(module)
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


def without(decision: Decision, unit: PlannedUnit) -> str:
    """What to pass to ``wrap`` where nobody calls ``unit``, in Python."""
    runs = list(_runs(decision.units))
    return f"units=[{', '.join(_expression(run) for run in runs if unit not in run)}]"


def _expression(run: list[PlannedUnit]) -> str:
    stem, dot, first = run[0].name.rpartition(".")
    numbers = [unit.name.rpartition(".")[2] for unit in run]
    if len(run) > 2 and numbers == [str(i) for i in range(len(run))]:
        return f"*(f'{stem}{dot}{{i}}' for i in range({len(run)}))"
    return ", ".join(repr(unit.name) for unit in run)


def describe(
    model: nn.Module,
    decision: Decision,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
) -> str:
    """The decision in words, before the model is sharded: counts are of full
    parameters."""
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
    for run in _runs(units):
        size = _count(_size(run[0].module, set()))
        if len(run) == 1:
            yield f"{run[0].name}: {run[0].why}, {size} parameters"
        else:
            yield (
                f"{run[0].name} to {run[-1].name}: {len(run)} times "
                f"{run[0].why}, {size} parameters each"
            )


def _runs(units: Iterable[PlannedUnit]) -> Iterator[list[PlannedUnit]]:
    """Runs of equal blocks that stand one behind the other."""
    run: list[PlannedUnit] = []
    for unit in units:
        if run and not _alike(run[-1], unit):
            yield run
            run = []
        run.append(unit)
    if run:
        yield run


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
