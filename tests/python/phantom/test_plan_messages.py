"""What `lowtide plan` says when it cannot answer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lowtide
from lowtide.cli import main
from lowtide.planning import model_file
from lowtide.planning.request import ModelFile, Script
from lowtide.planning.run import PlanError
from lowtide.planning.script import run_script
from lowtide.planning.worker import message_of, stack_of
from support import planned
from support.planned import plan_text


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line on stderr of `python -m lowtide plan ...`, which shows none of our
    own lines with it."""
    assert main(["plan", *arguments]) == 1
    said = capsys.readouterr().err.strip()
    assert "Traceback" not in said
    return said.splitlines()[-1]


# -- of the command, before anything runs --------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--world", "2", "--rank", "2"],
            "lowtide: plan --rank: expected one of the 2 ranks, got 2. Pass --world "
            "too.",
        ),
        (
            ["--steps", "0"],
            "lowtide: plan --steps: expected at least 1, got 0. The default of 3 "
            "reaches a steady state.",
        ),
        (
            ["--device-memory", "H100"],
            "lowtide: --device-memory: expected a size such as 80GiB or 512MiB, got "
            "'H100'. Write a number and a unit.",
        ),
        (
            ["--device-memory", "80"],
            "lowtide: --device-memory: expected a size such as 80GiB or 512MiB, got "
            "'80'. Write a number and a unit.",
        ),
        (
            ["--gpu", "h300"],
            "lowtide: phantom: gpu: expected one of a100-40, a100-80, h100, h200, "
            "b200, l40s, rtx4090, got 'h300'.",
        ),
        (
            ["3"],
            f"lowtide: plan: expected one model file, got {planned.LLAMA} 3. A script "
            "and its arguments follow `--`.",
        ),
        (
            ["--timeline", "x.gif"],
            "lowtide: plan --timeline: expected a file ending in .png, .svg or .html, "
            "got 'x.gif'. Choose one of the three.",
        ),
    ],
)
def test_of_options(capsys, given, message):
    assert complaint(capsys, planned.LLAMA, *given) == message


def test_a_size_is_refused_alike_by_lowtide_phantom(capsys):
    assert main(["phantom", "--device-memory", "80", "--", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "lowtide: --device-memory: expected a size such as 80GiB or 512MiB, got '80'. "
        "Write a number and a unit.\n"
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


def test_functions_nobody_can_import():
    with pytest.raises(ValueError, match="expected functions of a module") as raised:
        lowtide.plan(planned.build, lambda state: None)
    assert str(raised.value) == (
        "lowtide: plan: expected functions of a module, which a new process can "
        "import, got test_functions_nobody_can_import.<locals>.<lambda>. Define it at "
        "the top level of a file."
    )


# -- of model files -------------------------------------------------------------------


@pytest.fixture
def refusal(monkeypatch, tmp_path) -> Callable[..., str]:
    """What training a model file says, here, where there is no group."""
    monkeypatch.setattr(model_file.dist, "init_process_group", lambda backend: None)

    def refusal(text: str | None = None, **settings: str) -> str:
        path = planned.LLAMA
        if text is not None:
            path = str(tmp_path / "model.py")
            Path(path).write_text(text)
        program = ModelFile(path, **settings)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="^lowtide: plan") as raised:
            model_file.train_model_file(program, 1, lambda model: None)
        return message_of(raised.value).replace(path, "FILE")

    return refusal


def test_file_without_plan_model(refusal):
    assert refusal("x = 1\n") == (
        "lowtide: plan: expected a function plan_model(config, sequence) in FILE, got "
        "none. Add it (docs/plan.md), or run a training script with `python -m lowtide "
        "plan -- FILE`."
    )


@pytest.mark.parametrize(("settings", "got"), [({}, "none"), ({"config": "x"}, "'x'")])
def test_unknown_configuration(refusal, settings, got):
    assert refusal(**settings) == (
        f"lowtide: plan --config: expected a name that plan_model knows, got {got}. "
        "Pass one of those in FILE."
    )


BIASED = """import torch
def plan_model(config, sequence):
    return torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8))
"""


def test_heads_that_a_loss_needs(refusal):
    assert refusal(BIASED, loss="chunked") == (
        "lowtide: plan --loss chunked: expected PLAN_HEAD, the name of the output "
        "projection, in FILE, got none. Add it (docs/plan.md)."
    )
    assert refusal(BIASED + "PLAN_HEAD = '1'\n", loss="vocabulary") == (
        "lowtide: plan --loss vocabulary: expected PLAN_HEAD to name an nn.Linear "
        "without bias, got '1'. Choose --loss chunked."
    )
    assert refusal(loss="vocabulary", system="fsdp2") == (
        "lowtide: plan --loss vocabulary: expected --system lowtide or ddp, got fsdp2, "
        "whose head is gathered by its own forward only. Choose --loss chunked."
    )


# -- of programs ----------------------------------------------------------------------


@pytest.fixture
def failure(monkeypatch, tmp_path) -> Callable[..., str]:
    """What is said of a program, run here, that fails before it needs a GPU."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def failure(text: str, *arguments: str) -> str:
        script = tmp_path / "train.py"
        script.write_text(text)
        with pytest.raises((Exception, SystemExit), match=r".") as raised:
            run_script(Script((str(script), *arguments)))
        return message_of(raised.value).replace(str(script), "train.py")

    return failure


def test_traceback_begins_in_the_program(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "train.py"
    script.write_text("def train():\n    1 / 0\n\ntrain()\n")
    with pytest.raises(ZeroDivisionError) as raised:
        run_script(Script((str(script),)))
    assert raised.tb.tb_next is not None  # without this test's own line
    error = raised.value.with_traceback(raised.tb.tb_next)
    first, *lines = stack_of(error).splitlines()
    assert first == "Traceback (most recent call last):"
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "{script}", line 4, in <module>',
        f'  File "{script}", line 2, in train',
    ]
    assert "ZeroDivisionError" not in "\n".join(lines)  # the message has it
    with pytest.raises(FileNotFoundError) as refused:
        run_script(Script(("nowhere.py",)))
    assert stack_of(refused.value.with_traceback(refused.tb.tb_next)) == ""


def test_program_that_raises(failure):
    assert failure("import torch\n1 / 0\n") == (
        "lowtide: plan: expected the program to train, got ZeroDivisionError at "
        "train.py:2: division by zero. Values that only the GPU computes read as 1 or "
        "False; run the program on the CPU to see whether it fails there too."
    )


def test_arguments_that_the_program_refuses(failure):
    text = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    assert failure(text, "--lr") == (
        "lowtide: plan: expected the program to train, got SystemExit at train.py:2: "
        "2. Check its arguments and what it printed."
    )


def test_a_script_for_torchrun_without_a_world(failure, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert failure("import os\nrank = os.environ['RANK']\n") == (
        "lowtide: plan: expected the program to train, got KeyError at train.py:2: "
        "'RANK'. Pass --world N, which sets it as torchrun does."
    )


def test_missing_module(monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModuleNotFoundError) as raised:
        run_script(Script(("-m", "nowhere.train")))
    assert message_of(raised.value) == (
        "lowtide: plan: expected a module that can be imported, got 'nowhere.train'. "
        "Run the command where `python -m` finds it."
    )


@pytest.mark.parametrize("given", [["nowhere.py"], ["--", "nowhere.py"]])
def test_missing_file(capsys, given):
    assert complaint(capsys, *given) == (
        "lowtide: plan: expected a Python file, got 'nowhere.py'. Check the path."
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
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "w = torch.nn.Linear(8, 8)\n"
        "opt = torch.optim.SGD(w.parameters(), lr=1)\n"
        "while True:\n"
        "    w(torch.ones(1, 8)).sum().backward()\n"
        "    opt.step()\n"
    )
    assert complaint(capsys, "--", str(path)) == (
        "lowtide: plan: expected a program that trains on 'cuda', got nothing there in "
        f"3 steps of {path}. Move its model and data to 'cuda', or ask for the device "
        "in its arguments."
    )


def test_traceback_of_the_program_comes_along():
    with pytest.raises(PlanError) as raised:
        lowtide.plan(planned.build, planned.step_that_fails)
    assert "RuntimeError" in str(raised.value)
    assert "in step_that_fails" in raised.value.traceback


def test_what_the_driver_lacks_is_named(tmp_path):
    text = "import torch\nx = torch.eye(4).to_sparse().cuda()\nx @ x\n"
    with pytest.raises(PlanError) as raised:
        plan_text(tmp_path, text)
    assert str(raised.value) == (
        "lowtide: plan: expected the program to train, got RuntimeError at "
        f"{tmp_path / 'train.py'}:3: CUDA error: operation not supported when calling "
        "`cusparseSpMatGetSize(matC, &C_num_rows1, &C_num_cols1, &C_num_nnz1)`. The "
        "driver that computes nothing lacks cusparseSpMatGetSize: leave this part of "
        "CUDA out where LOWTIDE_DRY_GPU is set, and please report it."
    )


ENDS_EARLY = """
import torch
w = torch.nn.Linear(8, 8, device='cuda')
opt = torch.optim.SGD(w.parameters(), lr=1)
for _ in range(2):
    w(torch.ones(1, 8, device='cuda')).sum().backward()
    opt.step()
w(torch.ones(1 << 20, 8, device='cuda'))
"""


def test_fewer_steps_than_asked_for(tmp_path):
    """The peak is in the evaluation behind them."""
    plan = plan_text(tmp_path, ENDS_EARLY)
    assert plan.notes == ["the program ended after 2 of 3 steps"]
    assert (plan.steps, plan.peak_step) == (2, 3)
    assert 64 << 20 < plan.peak_allocated - plan.by_category.get("cublas_workspace", 0)
