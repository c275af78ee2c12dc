"""`make dev` installs the same packages tomorrow: what the pinned ones need is pinned,
too."""

from importlib.metadata import distribution
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).parents[3] / "requirements"
OF_TORCH = ("nvidia-", "cuda-", "triton")  # torch pins them


def pinned(*files: str) -> dict[str, str]:
    """Versions by package."""
    lines = [
        line.partition("#")[0].strip()
        for file in files
        for line in (REQUIREMENTS / file).read_text().splitlines()
    ]
    wanted = [Requirement(line) for line in lines if line]
    return {canonicalize_name(one.name): str(one.specifier) for one in wanted}


def needed(*packages: str) -> set[str]:
    """These and all that they need, as installed."""
    found: set[tuple[str, str]] = set()
    waiting = [(package, "") for package in packages]
    while waiting:
        package, extra = waiting.pop()
        if (package, extra) in found:
            continue
        found.add((package, extra))
        for line in distribution(package).requires or ():
            one = Requirement(line)
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                name = canonicalize_name(one.name)
                waiting += [(name, asked) for asked in ("", *one.extras)]
    return {package for package, _ in found}


def test_what_is_installed_is_what_is_pinned():
    of_torch = f"torch-{torch.__version__.rpartition('.')[0]}.txt"
    chosen = pinned("build.txt", "dev.txt", of_torch)
    known = chosen | pinned("constraints.txt")
    packages = needed(*chosen)
    assert packages > set(chosen)
    installed = {
        package: f"=={distribution(package).version}"
        for package in packages
        if not package.startswith(OF_TORCH)
    }
    assert installed == {package: known.get(package) for package in installed}
