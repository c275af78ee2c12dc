"""What `import lowtide` costs and refuses."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide import _version_check
from lowtide._torch_version import VERSION


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_import_loads_only_lowtide_and_starts_no_cuda_context():
    done = run_python(
        "import sys, json, torch\n"
        "before = set(sys.modules)\n"
        "import lowtide\n"
        "print(json.dumps([sorted(set(sys.modules) - before),"
        " torch.cuda.is_initialized()]))"
    )
    assert done.returncode == 0, done.stderr
    new, cuda_initialized = json.loads(done.stdout)
    assert "lowtide._C" in new
    allowed = {"lowtide", *sys.stdlib_module_names}
    heavy = [name for name in new if name.split(".")[0] not in allowed]
    assert heavy == [], (
        f"`import lowtide` also imports {heavy}; import them where they are used "
        "(inside the function, or in a module the package loads on first access)"
    )
    assert not cuda_initialized


def test_every_public_name_is_there_after_importing_lowtide_alone():
    done = run_python(
        "import lowtide\n"
        "for name in lowtide.__all__: getattr(lowtide, name)\n"
        "print(lowtide.phantom.timeline.__name__)"
    )
    assert done.stdout == "timeline\n", done.stderr


OF_CUDA_12_8 = "pip install torch=={}+cu128 --index-url https://download.pytorch.org"
INSTALLED = str(torch.__version__).split("+")[0]


@pytest.mark.parametrize(
    ("built_for", "built_for_cuda", "command"),
    [
        ("2.10.0", "", "pip install torch==2.10.0"),
        ("3.11.0", "", "pip install torch==3.11.0"),
        ("2.10.0+cu128", "12.8", OF_CUDA_12_8.format("2.10.0") + "/whl/cu128"),
        (INSTALLED + "+cu128", "12.8", OF_CUDA_12_8.format(INSTALLED) + "/whl/cu128"),
    ],
)
def test_other_torch_is_refused(built_for, built_for_cuda, command):
    with pytest.raises(ImportError) as error:
        _version_check.check_torch(built_for=built_for, built_for_cuda=built_for_cuda)
    message = str(error.value)
    assert f"expected {built_for} (CUDA {built_for_cuda or 'off'})" in message
    assert f"got {torch.__version__} (CUDA {torch.version.cuda or 'none'})" in message
    assert f"or run `{command}`." in message
    assert "`pip install --no-build-isolation .`" in message


def test_command_is_not_satisfied_by_a_wheel_of_another_cuda(tmp_path):
    """pip, beside the CPU's wheel of the same version, and no wheels to be had."""
    metadata = tmp_path / f"torch-{INSTALLED}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {INSTALLED}+cpu\n"
    )
    metadata.with_name("INSTALLER").write_text("pip\n")

    def satisfied(requirement: str) -> bool:
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps"]
        done = subprocess.run(
            [*pip, "--no-index", requirement],
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert ("No matching distribution" in done.stderr) == (done.returncode != 0)
        return done.returncode == 0

    with pytest.raises(ImportError) as error:
        _version_check.check_torch(built_for=INSTALLED, built_for_cuda="12.8")
    assert satisfied(f"torch=={INSTALLED}")
    assert not satisfied(
        re.findall(r"or run `pip install ([^ `]+)", str(error.value))[0]
    )


def other_torchs() -> list[Path]:
    """Pythons of the same ABI in the checkout's environments of other versions."""
    pattern = f".venv*/lib/python{sys.version_info[0]}.{sys.version_info[1]}"
    return [
        place.parents[1] / "bin/python"
        for place in sorted(Path(__file__).parents[3].glob(pattern))
        for version in place.glob(f"site-packages/torch-{VERSION[0]}.*.dist-info")
        if not version.name.startswith("torch-{}.{}.".format(*VERSION))
    ]


def test_really_another_torch_is_refused():
    pythons = other_torchs()
    if not pythons:
        pytest.skip("no environment of another torch, such as .venv-2.12")
    done = subprocess.run(
        [pythons[0], "-c", "import torch, lowtide"],
        env=os.environ | {"PYTHONPATH": str(Path(lowtide.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert f"ImportError: lowtide: torch: expected {torch.__version__} (" in done.stderr
    assert "got 2." in done.stderr and "or run `pip install torch==" in done.stderr


def test_other_python_is_refused():
    soabi = sysconfig.get_config_var("SOABI")
    _version_check.check_python(built_for=soabi)
    other = "cpython-39-x86_64-linux-gnu"
    with pytest.raises(ImportError) as error:
        _version_check.check_python(built_for=other)
    message = str(error.value)
    assert f"expected {other}, which" in message and f"got {soabi}" in message
    assert f"`{sys.executable} -m pip install` with the wheel" in message


@pytest.mark.parametrize("built_for", ["2.11.0", "2.11.7+cpu"])
def test_same_minor_is_accepted(monkeypatch, built_for):
    monkeypatch.setattr(torch, "__version__", "2.11.1+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    _version_check.check_torch(built_for=built_for, built_for_cuda="")
    _version_check.check_torch(built_for=built_for, built_for_cuda="13.0")


def test_import_checks_before_the_extension_loads():
    done = run_python(
        "import sys, torch\n"
        "torch.__version__ = '2.10.0'\n"
        "try:\n"
        "    import lowtide\n"
        "except ImportError as error:\n"
        "    assert 'lowtide._C' not in sys.modules\n"
        "    print(error)"
    )
    expected = f"lowtide: torch: expected {torch.__version__} "
    assert done.stdout.startswith(expected), done.stderr
    assert "got 2.10.0" in done.stdout


def test_source_tree_without_a_build_says_so():
    done = run_python(
        "import sys; sys.modules['lowtide._built_for'] = None\nimport lowtide"
    )
    assert "got a source tree. Run `make dev`" in done.stderr
