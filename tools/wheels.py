"""Builds wheels for each torch, Python and CUDA or not, and tries each one in a new
environment beside its torch: `make wheels [TORCH=2.15] [PYTHON=3.12] [CUDA=OFF]`.

    tools/wheels.py [--torch 2.15 ...] [--python 3.12 ...] [--cuda ON|OFF ...]

A wheel is `lowtide-0.1.0+cu130torch2.11-cp312-cp312-manylinux_2_28_x86_64.whl`: its
version says what it is for, as flash-attn's does, and it asks for that torch. torch's
and NVIDIA's libraries stay outside, since a process has them once; auditwheel holds all
else to the policy that torch's own wheels have.

OFF is built with the torch that LOWTIDE_CPU_TORCH_INDEX has as `torch==2.11.0+cpu`;
where that is not set, with the one of PyPI, whose headers are the same: it trains on
CPUs with either, and plans programs of FSDP2's where torch's CUDA build is.

Environments stay in build-wheels. All Pythons of one torch see its headers under one
path, so that ccache compiles the engine once for them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build-wheels"
POLICY = "manylinux_2_28_x86_64"
# The newest versions of symbols in that policy.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0)}
# Come with torch.
OUTSIDE = ("libtorch*.so", "libc10*.so", "libcudart.so.*")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PINS = ROOT / "requirements"
INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def main(arguments: Sequence[str] | None = None) -> int:
    torches = sorted(
        (
            path.stem.partition("-")[2]
            for path in (ROOT / "requirements").glob("torch-*")
        ),
        key=lambda minor: tuple(map(int, minor.split("."))),
    )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="+", choices=torches, default=torches)
    parser.add_argument("--python", nargs="+", metavar="VERSION", default=PYTHONS)
    parser.add_argument("--cuda", nargs="+", choices=["ON", "OFF"])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args(arguments)
    asked = "--python" in (arguments or sys.argv)
    built, left_out = [], []
    source = None
    for minor, version in itertools.product(options.torch, options.python):
        interpreter = find_python(version)
        if interpreter is None:
            problem = f"Python {version}: got none. Install it, or put it on PATH."
            if asked:
                parser.error(problem)
            left_out.append(f"torch {minor}, {problem}")
            continue
        for cuda in options.cuda or ("ON", "OFF"):
            python = environment(minor, version, interpreter, cuda)
            source = source or unpacked_sdist(python, options.out)
            began = os.times()
            wheel = build(python, source, minor, cuda, options.out)
            took = minutes_since(began)
            try_out(wheel, interpreter, WORK / "tried", torch=torch_of(minor, cuda))
            built.append(f"{wheel.name}  {took}")
    print("\nWheels:", *built, sep="\n  ")
    if left_out:
        print("Not built:", *left_out, sep="\n  ")
    return 0


def minutes_since(began: os.times_result) -> str:
    """As the clock says, and those of all processes together."""
    now = os.times()
    computed = (now.children_user - began.children_user) + (
        now.children_system - began.children_system
    )
    elapsed = now.elapsed - began.elapsed
    return f"{elapsed / 60:.1f} minutes, {computed / 60:.1f} of a core's"


# -- environments ----------------------------------------------------------------------


def find_python(version: str) -> Path | None:
    """That runs: pyenv has names on PATH of interpreters that are not chosen."""
    on_path = shutil.which(f"python{version}")
    places = Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")
    for place in (*([on_path] if on_path else []), *places):
        if subprocess.run([place, "-c", ""], capture_output=True).returncode == 0:
            return Path(place)
    return None


def environment(minor: str, version: str, interpreter: Path, cuda: str) -> Path:
    """The interpreter of one that has this torch and what builds wheels."""
    torch = torch_of(minor, cuda)
    cpu = "-cpu" if len(torch) > 1 else ""
    home = WORK / f"torch-{minor}{cpu}-python-{version}"
    python = home / "bin" / "python"
    done = home / ".done"
    if done.exists() and done.read_text() == torch[0]:
        return python
    run(interpreter, "-m", "venv", "--clear", home)
    run(python, *INSTALL, "-r", PINS / "build.txt")
    run(python, *INSTALL, *torch)
    done.write_text(torch[0])
    return python


def torch_of(minor: str, cuda: str) -> tuple[str, ...]:
    """What pip is asked for."""
    text = (PINS / f"torch-{minor}.txt").read_text()
    (pin,) = re.findall(r"^torch==.*$", text, re.M)
    index = os.environ.get("LOWTIDE_CPU_TORCH_INDEX") if cuda == "OFF" else None
    return (f"{pin}+cpu", "--extra-index-url", index) if index else (pin,)


def unpacked_sdist(python: Path, out: Path) -> Path:
    """Wheels are built from what the sdist has; the folder is the same each time."""
    made = WORK / "sdist"
    shutil.rmtree(made, ignore_errors=True)
    options = ("--sdist", "--no-isolation", "--outdir", made)
    run(python, "-m", "build", *options, ROOT)
    (archive,) = made.glob("lowtide-*.tar.gz")
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(archive, out)
    with tarfile.open(archive) as files:
        files.extractall(made)
    source = WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    return (made / archive.name.removesuffix(".tar.gz")).rename(source)


# -- building --------------------------------------------------------------------------


def build(python: Path, source: Path, minor: str, cuda: str, out: Path) -> Path:
    """A wheel in `out` that the policy allows."""
    site = WORK / f"torch-{minor}"
    site.unlink(missing_ok=True)  # a link
    site.symlink_to(next(python.parents[1].glob("lib/python*/site-packages")))
    settings = {
        "LOWTIDE_CUDA": cuda,
        "LOWTIDE_LOCAL_VERSION": f"+{flavour(python, cuda)}torch{minor}",
        "CCACHE_BASEDIR": str(WORK),
        "PYTHONPATH": str(site),
    }
    shutil.rmtree(source / "build", ignore_errors=True)
    made = WORK / "made"
    shutil.rmtree(made, ignore_errors=True)
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    run(
        *(python, "-m", "pip", "wheel", *options, "--wheel-dir", made, source),
        environment=settings,
    )
    (wheel,) = made.glob("lowtide-*.whl")
    return repaired(wheel, out, tools=python.parent)


def flavour(python: Path, cuda: str) -> str:
    """ "cu130" as in torch's own version, or "cpu"."""
    if cuda == "OFF":
        return "cpu"
    version = run(python, "-c", "import torch; print(torch.version.cuda or '')").strip()
    if not version:
        raise SystemExit(
            f"lowtide: {python}: expected a CUDA build of torch, got none. "
            "Pass --cuda OFF."
        )
    return "cu" + version.replace(".", "")


def repaired(wheel: Path, out: Path, *, tools: Path) -> Path:
    """The wheel under the policy's name, which auditwheel gives only to one that keeps
    to it; nor may a library hope that torch has what an old libstdc++ lacks."""
    unpacked = WORK / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with zipfile.ZipFile(wheel) as files:
        files.extractall(unpacked)
    libraries = sorted(unpacked.rglob("*.so"))
    if found := {each.name: names for each in libraries if (names := too_new(each))}:
        raise SystemExit(
            f"lowtide: {wheel.name}: expected only what {POLICY} has, got {found}. "
            "Define it in csrc/base/older_libraries.cpp."
        )
    outside = [word for name in OUTSIDE for word in ("--exclude", name)]
    place = WORK / "repaired"
    shutil.rmtree(place, ignore_errors=True)
    run(
        *(tools / "auditwheel", "repair", "--plat", POLICY, "--only-plat", *outside),
        *("--wheel-dir", place, wheel),
        environment={"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
    )
    (done,) = place.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(done, out))


def too_new(library: Path) -> list[str]:
    """Names that it needs of glibc and libstdc++ which the policy's are too old for, or
    which are given no version since a library of torch's happens to define them."""
    return [name for name in undefined_names(library) if not allowed(name)]


def undefined_names(library: Path) -> list[str]:
    listing = run("nm", "-D", "-u", library)
    return [line.split()[-1] for line in listing.splitlines()]


# Without a version; old libraries have them.
_OLD_ENOUGH = re.compile(
    r"_ZNSt15__exception_ptr13exception_ptr(9_M_addref|10_M_release)Ev"
)
_OF_STD = re.compile(r"_Z(N?K?St|S[dosai])")


def allowed(name: str) -> bool:
    symbol, _, version = name.partition("@")
    if not version:
        return not _OF_STD.match(symbol) or bool(_OLD_ENOUGH.fullmatch(symbol))
    library, _, number = version.strip("@").partition("_")
    if library not in NEWEST or not number[:1].isdigit():
        return library != "GLIBC"  # GLIBC_PRIVATE
    return tuple(map(int, number.split("."))) <= NEWEST[library]


# -- trying ----------------------------------------------------------------------------


def try_out(
    wheel: Path,
    interpreter: Path,
    home: Path,
    *,
    torch: Sequence[str] = (),
    packages: Path | None = None,
) -> None:
    """Installs it in `home`, a new environment with no compiler on PATH, beside this
    torch or the packages of another environment, and trains and plans there."""
    run(interpreter, "-m", "venv", "--clear", home)
    bare = home / "bin" / "python"
    nothing_else = {"PATH": str(bare.parent), "PYTHONPATH": ""}
    if torch:
        run(bare, *INSTALL, *torch, environment=nothing_else)
    if packages:
        (site,) = home.glob("lib/python*/site-packages")
        # A path listed here is searched, but .pth files inside it are not read.
        (site / "packages.pth").write_text(f"{packages}\n")
    run(bare, *INSTALL, f"{wheel}[plan]", environment=nothing_else)
    program = ROOT / "tools" / "first_step.py"
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run(bare, *ranks, program, "--compare", environment=nothing_else, cwd=home)
    said += run(
        *(bare, "-m", "lowtide", "plan", "--gpu", "h100", "--world", "2", "--"),
        program,
        environment=nothing_else,
        cwd=home,
    )
    for expected in ("rank 1 has FSDP2's bits", "reserved"):
        if expected not in said:
            raise SystemExit(
                f"lowtide: {wheel.name}: expected '{expected}' of {program.name}, got "
                f"{said!r}. Its environment is {home}."
            )


def run(
    *command: object,
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """What it printed; raises with both streams if it failed."""
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    done = subprocess.run(
        words,
        env=os.environ | (environment or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(
            f"lowtide: wheels: expected `{' '.join(words)}` to succeed, got exit "
            f"status {done.returncode}.\n{done.stdout}{done.stderr}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
