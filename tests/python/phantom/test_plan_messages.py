"""What `lowtide plan` says when it cannot answer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import lowtide
from lowtide.cli import main
from lowtide.planning.request import Request, Script
from lowtide.planning.run import PlanError, plan_request
from support import planned
from support.planned import TOPK


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line on stderr of `python -m lowtide plan ...`."""
    assert main(["plan", *arguments]) == 1
    return capsys.readouterr().err.strip().splitlines()[-1]


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def test_rank_outside_of_the_world(capsys):
    assert complaint(capsys, planned.LLAMA, "--world", "2", "--rank", "2") == (
        "lowtide: plan --rank: expected one of the 2 ranks, got 2. Pass --world too."
    )


def test_no_steps(capsys):
    assert complaint(capsys, planned.LLAMA, "--steps", "0") == (
        "lowtide: plan --steps: expected at least 1, got 0. The default of 3 reaches a "
        "steady state."
    )


def test_device_memory_without_a_number(capsys):
    assert complaint(capsys, planned.LLAMA, "--device-memory", "H100") == (
        "lowtide: plan: expected a size such as 80GiB or 512MiB, got 'H100'. Write a "
        "number and a unit."
    )


def test_script_arguments_without_dashes(capsys):
    assert complaint(capsys, "train.py", "3") == (
        "lowtide: plan: expected one model file, got train.py 3. A script and its "
        "arguments follow `--`."
    )


def test_timeline_of_an_unknown_kind(capsys):
    assert complaint(capsys, planned.LLAMA, "--timeline", "x.gif") == (
        "lowtide: plan --timeline: expected a file ending in .png, .svg or .html, got "
        "'x.gif'. Choose one of the three."
    )


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_missing_extra(capsys, monkeypatch, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda p: None if p == package else find_spec(p)
    )
    assert complaint(capsys, planned.LLAMA, "--timeline", "x.png") == (
        f"lowtide: plan: expected the package {package}, got none. Run `pip install "
        "'lowtide[plan]'`, or call lowtide.plan from Python, which needs neither rich "
        "nor matplotlib."
    )


def test_missing_file(capsys):
    assert complaint(capsys, "nowhere.py") == (
        "lowtide: plan: expected a Python file, got 'nowhere.py'. Check the path."
    )


def test_missing_script(capsys):
    assert complaint(capsys, "--", "nowhere.py") == (
        "lowtide: plan: expected a Python file, got 'nowhere.py'. Check the path."
    )


def test_file_without_plan_model(capsys, tmp_path):
    path = script(tmp_path, "x = 1\n")
    assert complaint(capsys, path) == (
        f"lowtide: plan: expected a function plan_model(config, sequence) in {path}, "
        "got none. Add it (docs/plan.md), or run a training script with `python -m "
        f"lowtide plan -- {path}`."
    )


def test_chunked_loss_without_a_head(capsys, tmp_path):
    path = script(
        tmp_path,
        "import torch\n"
        "def plan_model(config, sequence):\n"
        "    return torch.nn.Sequential(torch.nn.Embedding(8, 8))\n",
    )
    assert complaint(capsys, path, "--loss", "chunked") == (
        "lowtide: plan --loss chunked: expected PLAN_HEAD, the name of the output "
        f"projection, in {path}, got none. Add it (docs/plan.md)."
    )


def test_program_that_never_steps():
    with pytest.raises(PlanError) as raised:
        lowtide.plan(planned.build, planned.step_without_optimizer)
    assert str(raised.value) == (
        "lowtide: plan: expected a program that calls the step() of a "
        "torch.optim.Optimizer, got none when step_without_optimizer ended. Check that "
        "it trains with these arguments, and not in processes that it starts."
    )


def test_program_on_the_cpu(capsys, tmp_path):
    text = (
        "import torch\n"
        "w = torch.nn.Linear(8, 8)\n"
        "opt = torch.optim.SGD(w.parameters(), lr=1)\n"
        "while True:\n"
        "    w(torch.ones(1, 8)).sum().backward()\n"
        "    opt.step()\n"
    )
    path = script(tmp_path, text)
    assert complaint(capsys, "--", path) == (
        "lowtide: plan: expected a program that trains on 'cuda', got nothing there in "
        f"3 steps of {path}. Move its model and data to 'cuda', or ask for the device "
        "in its arguments."
    )


def test_program_that_raises(capsys, tmp_path):
    path = script(tmp_path, "import torch\nassert torch.cuda.is_available()\n1 / 0\n")
    assert complaint(capsys, "--", path) == (
        f"lowtide: plan: expected the program to train, got ZeroDivisionError at "
        f"{path}:3: division by zero. Values on the device are 1 or False; run the "
        "program on the CPU to see whether it fails there too."
    )


def test_traceback_of_the_program_comes_along():
    with pytest.raises(PlanError) as raised:
        lowtide.plan(planned.build, planned.step_that_fails)
    assert "RuntimeError" in str(raised.value)
    assert "in step_that_fails" in raised.value.traceback


def test_errors_of_the_device_keep_their_words(tmp_path):
    text = "import torch\ntorch.nonzero(torch.ones(3, device='cuda'))\n"
    with pytest.raises(PlanError, match=r"^lowtide: phantom: operator aten::nonzero"):
        plan_request(Request(Script(script(tmp_path, text))))


def test_process_that_dies():
    with pytest.raises(PlanError) as raised:
        lowtide.plan(planned.build, planned.never_returns)
    assert str(raised.value) == (
        "lowtide: plan: expected the process that runs the program to answer, got its "
        "end with status 7. A negative status is a signal: -9 is often the host's "
        "memory running out, -11 with expandable segments one tensor that is larger "
        "than the GPU."
    )


def test_functions_nobody_can_import():
    with pytest.raises(ValueError, match="expected functions of a module") as raised:
        lowtide.plan(planned.build, lambda state: None)
    assert str(raised.value) == (
        "lowtide: plan: expected functions of a module, which a new process can "
        "import, got test_functions_nobody_can_import.<locals>.<lambda>. Define it at "
        "the top level of a file."
    )


def test_fewer_steps_than_asked_for(tmp_path):
    text = (
        "import torch\n"
        "w = torch.nn.Linear(8, 8, device='cuda')\n"
        "opt = torch.optim.SGD(w.parameters(), lr=1)\n"
        "for _ in range(2):\n"
        "    w(torch.ones(1, 8, device='cuda')).sum().backward()\n"
        "    opt.step()\n"
    )
    plan = plan_request(Request(Script(script(tmp_path, text))))
    assert plan.notes == ["the program ended after 2 of 3 steps"]
    assert plan.steps == 2


def test_memory_without_a_unit(capsys):
    assert complaint(capsys, planned.LLAMA, "--device-memory", "80") == (
        "lowtide: plan: expected a size such as 80GiB or 512MiB, got '80'. Write a "
        "number and a unit."
    )


@pytest.mark.parametrize(
    "given",
    [
        ["--system", "ddp"],
        ["--config", "8b"],
        ["--checkpoint", "none"],
        ["--loss", "plain"],
        ["--batch", "1"],
        ["--sequence", "8192"],
        ["--microbatches", "1"],
        ["--verify"],
    ],
)
def test_options_of_model_files_for_a_script(capsys, given):
    assert complaint(capsys, *given, "--", "train.py") == (
        f"lowtide: plan {given[0]}: expected a model file, got a script, which says "
        "itself how it trains. Leave the option out, or give it to the script."
    )


@pytest.mark.parametrize("name", ["json", "timeline", "snapshot", "output", "trace"])
def test_files_in_missing_folders(capsys, name):
    assert complaint(capsys, planned.LLAMA, f"--{name}", "none/x.svg") == (
        f"lowtide: plan --{name}: expected a file in a folder that exists, got "
        "'none/x.svg'. Create the folder first."
    )


def test_options_of_a_script_before_the_dashes(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "train.py", "--lr", "3e-4"])
    message = (
        "unrecognized arguments: --lr 3e-4. A training script and its arguments follow "
        "`--`: plan [options] -- TRAIN.py ..."
    )
    assert capsys.readouterr().err.strip().endswith(message)


def test_options_of_python(capsys):
    assert complaint(capsys, "--", "-u", "train.py") == (
        "lowtide: plan: expected a script or -m MODULE after `--`, got -u train.py. "
        "Leave other options of python out."
    )


def test_missing_module(capsys):
    assert complaint(capsys, "--", "-m", "nowhere.train") == (
        "lowtide: plan: expected a module that can be imported, got 'nowhere.train'. "
        "Run the command where `python -m` finds it."
    )


@pytest.mark.parametrize(("given", "got"), [([], "none"), (["--config", "x"], "'x'")])
def test_unknown_configuration(capsys, given, got):
    assert complaint(capsys, planned.LLAMA, *given) == (
        f"lowtide: plan --config: expected a name that plan_model knows, got {got}. "
        f"Pass one of those in {planned.LLAMA}."
    )


def test_operator_without_its_library(capsys):
    assert complaint(capsys, planned.LLAMA, "--allow", "topk") == (
        "lowtide: plan --allow: expected an operator with its library, such as "
        "aten::topk, got 'topk'. Write it as the message that named it."
    )


def test_the_message_names_what_allows_an_operator(tmp_path):
    path = script(tmp_path, TOPK)
    with pytest.raises(PlanError, match="--allow aten::topk to `lowtide plan`"):
        plan_request(Request(Script(path)))


@pytest.mark.parametrize(
    "given",
    [
        ["torchrun", "--nproc-per-node", "8", "train.py"],
        ["python", "train.py"],
        ["-m", "torch.distributed.run", "train.py"],
    ],
)
def test_a_launcher(capsys, given):
    assert complaint(capsys, "--", *given) == (
        "lowtide: plan: expected what the launcher is given after `--`, got "
        f"{' '.join(given)}. Leave it and its options out: --world says how many ranks "
        "there are."
    )


def test_arguments_that_the_program_refuses(capsys, tmp_path):
    text = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    path = script(tmp_path, text)
    assert complaint(capsys, "--", path, "--lr") == (
        f"lowtide: plan: expected the program to train, got SystemExit at {path}:2: 2. "
        "Check its arguments and what it printed."
    )


def test_a_script_for_torchrun_without_a_world(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    path = script(tmp_path, "import os\nrank = os.environ['RANK']\n")
    assert complaint(capsys, "--", path) == (
        f"lowtide: plan: expected the program to train, got KeyError at {path}:2: "
        "'RANK'. Pass --world N, which sets it as torchrun does."
    )


def test_what_only_cuda_has(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = script(tmp_path, "import torch\ntorch.cuda.CUDAGraph()\n")
    message = complaint(capsys, "--", path)
    assert message.startswith(
        f"lowtide: plan: expected the program to train, got AcceleratorError at {path}:"
        "2: CUDA error: "
    )
    assert message.endswith(
        ". The phantom device has nothing in place of this part of CUDA: leave it out "
        "where torch.cuda.get_device_name() is 'lowtide phantom'."
    )


def test_a_program_that_sets_the_allocator(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    text = (
        "import os\n"
        "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\n"
    )
    path = script(tmp_path, text + TOPK.replace(".topk(2)[0]", ""))
    assert complaint(capsys, "--", path) == (
        "lowtide: plan: expected PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF to "
        "stay what they were, '', got 'expandable_segments:True', which the program "
        "set. Set it before the command too."
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert main(["plan", "--", path]) == 0


def test_a_share_of_the_memory(capsys, monkeypatch, tmp_path):
    conf = "per_process_memory_fraction:0.8"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    assert complaint(capsys, "--", script(tmp_path, "x = 1\n")) == (
        "lowtide: plan: expected an allocator without per_process_memory_fraction, got "
        "0.8. Pass that share of the GPU as --device-memory."
    )
