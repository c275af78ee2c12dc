"""`python -m lowtide env` prints what a bug report needs."""

import json
import subprocess
import sys

import pytest
import torch

import lowtide
from lowtide import cli


def test_json_holds_every_section_and_the_versions(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("LOWTIDE_CUDA", "AUTO")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    assert cli.main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == ["lowtide", "torch", "cuda", "machine", "variables"]
    assert facts["lowtide"]["version"] == lowtide.__version__
    assert facts["lowtide"]["built for torch"] == torch.__version__
    assert facts["torch"]["version"] == torch.__version__
    assert {"fake", "gloo"} <= set(facts["torch"]["backends"])
    assert facts["machine"]["cores"] >= 1
    assert float(facts["machine"]["memory GiB"]) > 0
    assert facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert facts["variables"]["LOWTIDE_CUDA"] == "AUTO"
    assert "SOME_TOKEN" not in facts["variables"]


def test_text_names_every_fact_of_the_json(capsys):
    cli.main(["env", "--json"])
    facts = json.loads(capsys.readouterr().out)
    cli.main(["env"])
    text = capsys.readouterr().out
    for title, section in facts.items():
        assert f"[{title}]" in text
        for name in section:
            assert f"\n{name} " in text


def test_missing_tools_are_none_not_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cli.env.cuda_facts() == {"nvcc": None, "GPUs": []}


def test_nvcc_and_gpus_come_from_the_tools(monkeypatch, tmp_path):
    for name, output in (
        ("nvcc", "Cuda compilation tools, release 13.0, V13.0.88"),
        ("nvidia-smi", "NVIDIA H200, 143771 MiB, 580.65.06"),
    ):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\necho '{output}'\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.env.cuda_facts() == {
        "nvcc": "13.0.88",
        "GPUs": ["NVIDIA H200, 143771 MiB, 580.65.06"],
    }


def test_command_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "env"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[lowtide]\nversion ")


def test_unknown_command_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["emv"])
    assert exit.value.code == 2
    assert "invalid choice: 'emv'" in capsys.readouterr().err
