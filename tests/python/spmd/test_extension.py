"""A rule registered from C++ beside an operator, by an extension that includes what the
package installs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from lowtide import _C, spmd

SOURCE = """
#include "spmd/register_rule.h"

LOWTIDE_REPLICATION_RULE("spmd_extension::gelu", lowtide::spmd::LOCAL);
LOWTIDE_REPLICATION_RULE("spmd_extension::gather",
                         lowtide::spmd::COLLECTIVE(lowtide::spmd::Type::V,
                                                   lowtide::spmd::Type::R));
"""


def test_an_extension_registers_rules_when_it_is_loaded(tmp_path: Path) -> None:
    source, library = tmp_path / "rules.cpp", tmp_path / "rules.so"
    source.write_text(SOURCE)
    include, core = spmd.cpp_paths()
    subprocess.run(
        [
            *(os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC"),
            *(f"-I{include}", str(source), "-o", str(library), core),
            "-Wl,--allow-shlib-undefined",
        ],
        check=True,
    )
    assert _C.find_rule("spmd_extension::gelu") is None
    torch.ops.load_library(str(library))
    assert repr(_C.find_rule("spmd_extension::gelu")) == "LOCAL"
    assert repr(_C.find_rule("spmd_extension::gather")) == "COLLECTIVE(V, R)"
