import sysconfig
import venv
from pathlib import Path

import pytest
import setuptools
import torch


@pytest.fixture
def bare_venv(tmp_path: Path) -> Path:
    """The interpreter of an environment that holds no package of its own and finds
    this one's (torch, setuptools): nothing is downloaded, and lowtide is not there."""
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = sysconfig.get_path("purelib", vars={"base": str(home)})
    # A path listed here is searched, but .pth files inside it are not read.
    places = {str(Path(package.__file__).parents[1]) for package in (torch, setuptools)}
    Path(site, "torch.pth").write_text("\n".join(places))
    return python
