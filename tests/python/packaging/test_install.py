"""sdist -> wheel -> an environment without lowtide -> import, outside the checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import lowtide
import wheels

ROOT = Path(__file__).parents[3]
# The development build covers CUDA and files by themselves; this one is about the
# package.
OPTIONS = {"LOWTIDE_CUDA": "OFF", "LOWTIDE_UNITY": "ON", "MAX_JOBS": "2"}


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | OPTIONS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow("install")
@pytest.mark.timeout(1800)  # compiles the extension once
def test_sdist_and_wheel_install_into_a_new_environment(tmp_path):
    build = (sys.executable, "-m", "build", "--no-isolation")
    run(*build, "--sdist", "--outdir", tmp_path, cwd=ROOT)
    (sdist,) = tmp_path.glob("lowtide-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert not list(unpacked.rglob("*.so")) + list(unpacked.rglob("_built_for.py"))
    sdist_metadata = (unpacked / "PKG-INFO").read_text()

    local = f"+cputorch{'.'.join(torch.__version__.split('.')[:2])}"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LOWTIDE_LOCAL_VERSION", local)
        run(*build, "--wheel", "--outdir", tmp_path, cwd=unpacked)
    (built,) = tmp_path.glob("lowtide-*.whl")
    tools = Path(sysconfig.get_path("scripts"))
    wheel = wheels.repaired(built, tmp_path / "repaired", tools=tools)
    assert wheel.name.endswith(f"{wheels.POLICY}.whl") and local in wheel.name
    contents = zipfile.ZipFile(wheel)
    names = contents.namelist()
    for name in (
        *("liblowtide_core.so", "_C.pyi", "py.typed", "cli/env.py"),
        *("liblowtide_cuda_dry.so", "liblowtide_dry_observer.so"),
        *("phantom/clock.py", "phantom/dry/program.py"),
    ):
        assert f"lowtide/{name}" in names
    # Nothing of torch's is inside.
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lowtide"}
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    lines = contents.read(metadata).decode().splitlines()
    assert f"Requires-Dist: torch=={local.removeprefix('+cputorch')}.*" in lines
    assert "Requires-Dist: torch<2.16,>=2.11" in sdist_metadata.splitlines()
    assert "Requires-Dist: xxhash>=3" in lines
    for extra in ("demo", "dev", "test"):
        assert f"Provides-Extra: {extra}" in lines

    packages = Path(sysconfig.get_paths()["purelib"])
    wheels.try_out(wheel, Path(sys.executable), tmp_path / "tried", packages=packages)
    bare = tmp_path / "tried" / "bin" / "python"
    answer = run(
        bare,
        "-c",
        "import json, lowtide\n"
        "print(json.dumps([lowtide.__file__, lowtide._C.build_info()]))",
        cwd=tmp_path,
    )
    path, info = json.loads(answer)
    assert Path(path).is_relative_to(bare.parents[1])
    assert info["version"] == lowtide.__version__.split("+")[0] + local
    assert info["cuda"] is False

    (tmp_path / "dry.py").write_text("import torch; torch.ones(1, device='cuda')")
    phantom = (bare, "-m", "lowtide", "phantom", "--json", "-", "--", "dry.py")
    (device,) = json.loads(run(*phantom, cwd=tmp_path))["devices"]
    assert device["reserved"] == 2 << 20
