"""What `import lowtide` costs and refuses."""

import json
import subprocess
import sys
import sysconfig

import pytest
import torch

from lowtide import _version_check


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


@pytest.mark.parametrize(
    ("built_for", "built_for_cuda"),
    [("2.10.0", ""), ("3.11.0", ""), (str(torch.__version__), "12.8")],
)
def test_other_torch_is_refused(built_for, built_for_cuda):
    with pytest.raises(ImportError) as error:
        _version_check.check_torch(built_for=built_for, built_for_cuda=built_for_cuda)
    message = str(error.value)
    assert f"expected {built_for} (CUDA {built_for_cuda or 'off'})" in message
    assert f"got {torch.__version__} (CUDA {torch.version.cuda or 'none'})" in message
    assert f"`pip install torch=={built_for.split('+')[0]}`" in message
    assert "`pip install --no-build-isolation .`" in message


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
