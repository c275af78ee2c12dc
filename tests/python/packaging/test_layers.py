"""A lower layer never includes a higher one, some rooms never meet, and no Python
modules import each other in a circle.

Reads the `#include "..."` lines of csrc and the import lines of python/lowtide, also
those for types alone and those inside functions. Add a new room or module to the table
of its language.
"""

import ast
import re
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Rooms of equal height do not include each other.
CPP_LAYERS = {
    "base": 0,
    "device": 1,
    "memory": 2,
    "comm": 2,
    "ops": 2,  # the engine calls it
    "shard": 3,
    "activation": 3,
    "gather": 3,
    "spmd": 3,
    "testing": 4,  # doubles of what is below, not shipped
    "phantom": 5,
    "python": 5,
}

# Rooms of one layer that do not know each other, either way.
CPP_STRANGERS = [("shard/parameters/", "shard/gradients/")]


PYTHON_LAYERS = {
    "_built_for": 0,
    "_torch_version": 0,
    "_version_check": 0,
    "_C": 0,
    "policies": 1,
    "_base": 1,
    "_sharding": 2,
    "_activation": 2,
    "_gather": 2,
    "activations": 3,
    "api": 3,
    "checkpoint": 3,
    "clipping": 3,
    "losses": 3,
    "memory": 3,
    "muon": 3,
    "optimizing": 3,
    "sleeping": 3,
    "phantom": 3,
    "sequence_parallel": 3,
    "spmd": 3,
    "planning": 4,  # runs programs: uses every engine, and the phantom
    "saving": 4,
    "stepping": 5,  # remembers as a save does
    "in_backward": 5,  # lets a save's copies run first
    "wrapping": 4,
    "integrations": 6,
    "cli": 7,
    "__init__": 8,
    "__main__": 8,
}


def may_use(room: str, other: str, layers: dict[str, int]) -> bool:
    return room == other or layers.get(other, 99) < layers.get(room, -1)


def cpp_violations(csrc: Path) -> list[str]:
    return [
        f"{source.relative_to(csrc)}:{line} includes {included}"
        for source in sorted(csrc.rglob("*"))
        if source.suffix in {".h", ".cpp", ".cu", ".cuh"}
        for line, included in quoted_includes(source)
        if not may_use(room_of(source, csrc), included.split("/")[0], CPP_LAYERS)
        or are_strangers(str(source.relative_to(csrc)), included)
    ]


def are_strangers(source: str, included: str) -> bool:
    return any(
        source.startswith(one) and included.startswith(other)
        for pair in CPP_STRANGERS
        for one, other in (pair, pair[::-1])
    )


def quoted_includes(source: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.read_text().splitlines(), start=1):
        if match := re.match(r'\s*#\s*include\s+"(.+)"', line):
            yield number, match[1]


def python_violations(package: Path) -> list[str]:
    return [
        f"{source.relative_to(package)}:{line} imports {imported}"
        for source in sorted(package.rglob("*.py"))
        for line, imported in own_imports(source)
        # What runs inside dry programs is loaded under a name of its own.
        if not (source.parent == package / "phantom/dry" and is_beside(imported))
        and not may_use(room_of(source, package), room_in(imported), PYTHON_LAYERS)
    ]


def python_circles(package: Path) -> list[str]:
    """Modules that lead back to themselves, and over which others."""
    names = {name_of(source, package): source for source in package.rglob("*.py")}
    imports = {
        name: {
            other
            for _, imported in own_imports(source)
            if (other := module_in(imported, names)) is not None
        }
        for name, source in names.items()
    }
    back = {name: reachable(name, imports) for name in names}
    return [
        f"{name}: {sorted(o for o in back[name] if name in back[o])}"
        for name in sorted(names)
        if name in back[name]
    ]


def name_of(source: Path, package: Path) -> str:
    parts = source.relative_to(package).with_suffix("").parts
    return ".".join(("lowtide", *(p for p in parts if p != "__init__")))


def module_in(imported: str, modules: Container[str]) -> str | None:
    """The module that ``imported``, itself or an attribute of one, stands in."""
    while imported and imported not in modules:
        imported = imported.rpartition(".")[0]
    of_extension = imported == "lowtide"  # lowtide._C, or what the package passes on
    return None if of_extension or not imported else imported


def reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        new = imports[pending.pop()] - found
        found |= new
        pending += new
    return found


def own_imports(source: Path) -> Iterator[tuple[int, str]]:
    """(line, "lowtide.room.module"), also inside functions; all are absolute."""
    for node in ast.walk(ast.parse(source.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (f"{node.module}." if node.module else "")
            names = [origin + alias.name for alias in node.names]
        for name in names:
            if name.startswith((".", "lowtide.")) or name == "lowtide":
                yield node.lineno, name


def is_beside(imported: str) -> bool:
    return imported.startswith(".") and not imported.startswith("..")


def room_of(source: Path, root: Path) -> str:
    return source.relative_to(root).parts[0].removesuffix(".py")


def room_in(imported: str) -> str:
    """A name that is no room, such as fully_shard, comes from the package itself."""
    parts = imported.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in PYTHON_LAYERS else "__init__"


def test_cpp_layers():
    assert cpp_violations(ROOT / "csrc") == []


def test_python_layers():
    assert python_violations(ROOT / "python/lowtide") == []


def test_python_has_no_import_circles():
    assert python_circles(ROOT / "python/lowtide") == []


@pytest.mark.parametrize(
    "statement",
    [
        "from lowtide._sharding.unit import UnitState",
        "from lowtide._sharding import unit",
        "if TYPE_CHECKING:\n    from lowtide._sharding.unit import UnitState",
        "def late():\n    import lowtide._sharding.unit",
    ],
)
def test_import_circles_are_found(tmp_path, statement):
    files = {
        "_sharding/unit.py": "from lowtide._sharding.root import build_root",
        "_sharding/root.py": "from lowtide._sharding import _C, ties",
        "_sharding/ties.py": statement,
        "api.py": "from lowtide._sharding.unit import UnitState",
    }
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    three = [f"lowtide._sharding.{name}" for name in ("root", "ties", "unit")]
    assert python_circles(tmp_path) == [f"{name}: {three}" for name in three]


def test_model_of_time_includes_neither_torch_nor_cuda():
    sources = sorted((ROOT / "csrc/phantom/time").glob("*"))
    included = {
        name
        for source in sources
        for name in re.findall(r'#include ["<](.+)[">]', source.read_text())
    }
    assert {"phantom/time/costs.h", "vector"} <= included
    foreign = {name for name in included if name.endswith((".h", ".hpp"))}
    assert sorted(f for f in foreign if not f.startswith("phantom/time/")) == []


@pytest.mark.parametrize(
    ("file", "included", "allowed"),
    [
        ("memory/slab.cpp", "device/runtime.h", True),
        ("memory/slab.cpp", "memory/slab.h", True),
        ("shard/unit.h", "comm/collectives.h", True),
        ("shard/gradients/gradient_rows.cpp", "ops/foreach.h", True),
        ("python/module.cpp", "ops/schemas.h", True),
        ("phantom/driver/nccl.cpp", "phantom/time/costs.h", True),
        ("device/cuda/runtime.cu", "memory/ledger.h", False),  # upward
        ("shard/unit.h", "phantom/driver/device.h", False),
        ("python/module.cpp", "phantom/driver/device.h", False),  # sideways
        ("memory/slab.cpp", "comm/collectives.h", False),  # sideways
        ("ops/cuda/foreach.cpp", "memory/ledger.h", False),  # sideways
        ("shard/unit.h", "activation/frame.h", False),  # sideways
        ("shard/unit.h", "shard/parameters/kept_part.h", True),
        ("shard/parameters/kept_part.h", "shard/gradients/parcel.h", False),
        ("shard/gradients/parcel.h", "shard/parameters/kept_part.h", False),
        ("shard/unit.h", "testing/scripted_runtime.h", False),
        ("shard/unit.h", "python/bind.h", False),
        ("shard/unit.h", "unit_state.h", False),  # not relative to csrc
        ("toys/x.h", "base/check.h", False),  # a room nobody entered above
    ],
)
def test_cpp_rule(tmp_path, file, included, allowed):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f'// text\n#include <vector>\n#include "{included}"\n')
    found = [] if allowed else [f"{file}:3 includes {included}"]
    assert cpp_violations(tmp_path) == found


@pytest.mark.parametrize(
    ("file", "statement", "violation"),
    [
        ("api.py", "from lowtide._sharding.unit import UnitState", None),
        ("_sharding/unit.py", "from lowtide import _C", None),
        ("_sharding/root.py", "from lowtide._sharding.unit import UnitState", None),
        ("__init__.py", "from lowtide.api import fully_shard", None),
        ("api.py", "import torch, lowtideous", None),
        ("_sharding/unit.py", "import lowtide.api", "lowtide.api"),
        ("_sharding/unit.py", "from lowtide import api", "lowtide.api"),
        ("policies.py", "def f():\n    from lowtide import cli", "lowtide.cli"),
        ("api.py", "import lowtide", "lowtide"),
        ("cli/env.py", "from lowtide import fully_shard", "lowtide.fully_shard"),
        ("cli/env.py", "from ..api import x", "..api.x"),  # write it absolutely
        ("phantom/dry/report.py", "from . import driver", None),
        ("phantom/dry/report.py", "from .driver import launches", None),
        ("phantom/dry/report.py", "from .. import clock", "..clock"),
        ("phantom/x.py", "from . import driver", ".driver"),
        ("toys.py", "from lowtide import _C", "lowtide._C"),
    ],
)
def test_python_rule(tmp_path, file, statement, violation):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(statement)
    found = [line.split(" imports ")[1] for line in python_violations(tmp_path)]
    assert found == ([violation] if violation else [])
