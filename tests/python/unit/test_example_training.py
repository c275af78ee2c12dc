"""The parts of examples/train_bytes.py and examples/demo.py, one process each."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn

import instruments
from checkpoint import Checkpoint
from comparison import continues, same_bits
from evaluate import generate, parameters_sha256, printable
from llama import CONFIGS, Llama, init_weights
from lowtide._torch_version import VERSION
from options import parse_args
from unsharded import UnshardedReplicas

CPU = torch.device("cpu")


def trained_linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train_a_step(model, optimizer)
    return model, optimizer


def train_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_replicas_average_the_gradients_of_all_ranks():
    model = nn.Linear(8, 4, bias=False)
    inputs = torch.randn(2, 3, 8)
    replicas = UnshardedReplicas(model, num_ranks=2, param_dtype=torch.float32)

    def one_rank(rank: int) -> int:
        for _ in range(2):  # microbatches
            replicas(inputs[rank]).sum().backward()
        return rank

    assert replicas.accumulate(one_rank) == [0, 1]
    by_rank = [2 * inputs[rank].sum(0).expand(4, 8) for rank in range(2)]
    torch.testing.assert_close(model.weight.grad, (by_rank[0] + by_rank[1]) / 2)


def test_replicas_compute_in_the_parameter_dtype_and_add_in_fp32():
    model = nn.Linear(8, 4, bias=False)
    replicas = UnshardedReplicas(model, num_ranks=1, param_dtype=torch.bfloat16)
    x = torch.ones(1, 8, dtype=torch.bfloat16)

    def one_rank(rank: int) -> None:
        for scale in (256.0, 1.0, -256.0):
            out = replicas(x)
            assert out.dtype == torch.bfloat16
            (out * scale).sum().backward()

    replicas.accumulate(one_rank)
    assert torch.equal(model.weight.grad, torch.ones(4, 8))  # bf16 would give 0


class InFp32(torch.autograd.Function):
    """As a norm's kernel gives the gradient of a weight in bf16."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.float().sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full((4,), 1 + 2**-12)


def test_replicas_round_a_gradient_as_fsdp2_of_this_torch():
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(4))
    module.forward = lambda: InFp32.apply(module.weight)
    replicas = UnshardedReplicas(module, num_ranks=1, param_dtype=torch.bfloat16)
    replicas.accumulate(lambda rank: replicas().backward())
    exact = VERSION >= (2, 15)
    assert module.weight.grad.tolist() == 4 * [1 + 2**-12 if exact else 1]


def test_replicas_clip_to_the_norm_of_all_gradients():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    replicas = UnshardedReplicas(model, num_ranks=2, param_dtype=torch.float32)
    norm = replicas.clip_grad_norm_(0.5)
    torch.testing.assert_close(norm, whole.norm())
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(clipped, whole * (0.5 / whole.norm()))


def test_a_checkpoint_brings_back_every_bit(tmp_path):
    model, optimizer = trained_linear()
    Checkpoint(model, optimizer, {"seed": 1}).save(tmp_path, step=1)
    train_a_step(model, optimizer)

    again = nn.Linear(8, 4, bias=False)
    its_optimizer = torch.optim.AdamW(again.parameters(), fused=True)
    checkpoint = Checkpoint(again, its_optimizer, {"seed": 1})
    assert checkpoint.load(tmp_path / "step-1") == 1
    train_a_step(again, its_optimizer)
    assert parameters_sha256(again) == parameters_sha256(model)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    model, optimizer = trained_linear()
    Checkpoint(model, optimizer, {"seed": 1, "config": "tiny"}).save(tmp_path, step=1)
    other = Checkpoint(model, optimizer, {"seed": 2, "config": "tiny"})
    before = parameters_sha256(model)
    with pytest.raises(ValueError, match=r"seed 1 \(now 2\)\. Pass the same options"):
        other.load(tmp_path / "step-1")
    assert parameters_sha256(model) == before


def test_a_digest_sees_one_bit():
    model, _ = trained_linear()
    before = parameters_sha256(model)
    with torch.no_grad():
        model.weight.view(torch.int32)[0, 0] ^= 1
    assert parameters_sha256(model) != before


@pytest.mark.slow
def test_generated_text_depends_on_the_seed_alone():
    model = Llama(CONFIGS["tiny"])
    init_weights(model, seed=0)

    def text(seed: int, temperature: float) -> str:
        return generate(
            model,
            num_bytes=24,
            context=16,
            temperature=temperature,
            seed=seed,
            device=CPU,
        )

    assert text(0, 1.0) == text(0, 1.0) != text(1, 1.0)
    assert text(0, 0.0) == text(1, 0.0)


def test_generated_text_steers_no_terminal():
    assert (
        printable(b"def f():\n\t\x1b[2J\x07\xff") == "def f():\n\t\ufffd[2J\ufffd\ufffd"
    )


def test_live_bytes_are_what_was_there_and_what_came():
    model, optimizer = trained_linear()
    memory = instruments.Memory(model, optimizer, CPU)
    memory.start()
    kept = torch.empty(1 << 20)  # from the step before, until the next
    with memory.recording():
        temporary = torch.empty(1 << 21)
        del kept, temporary
    parameters = 8 * 4 * 4
    optimizer_state = 2 * parameters + 4  # two moments and the step
    result = memory.result
    assert set(result["bytes"]["parameters"]) == {parameters}
    assert set(result["bytes"]["optimizer state"]) == {optimizer_state}
    assert max(result["bytes"]["other"]) == (4 << 20) + (8 << 20)
    assert result["bytes"]["other"][-1] == 0
    assert result["peak_bytes"] == parameters + optimizer_state + (12 << 20)


def test_an_unknown_collective_is_not_counted_as_nothing():
    with pytest.raises(NotImplementedError, match="got alltoall_base"):
        instruments.ring_bytes("alltoall_base", 8, 4)


@pytest.mark.parametrize(
    ("collective", "sent"),
    [
        ("all_gather", 3 * 1024),
        ("_all_gather_base", 3 * 1024),
        ("_reduce_scatter_base", 3 * 256),
        ("all_reduce", 2 * 3 * 256),
        ("allreduce_coalesced", 2 * 3 * 256),
    ],
)
def test_bytes_are_those_of_a_ring(collective, sent):
    assert instruments.ring_bytes(collective, 1024, 4) == sent


RUN = {
    "first_step": 0,
    "losses": [["0x1.0p+2", "0x1.1p+2"], ["0x1.2p+1", "0x1.3p+1"], ["0x1.4p+1"]],
    "validations": {
        "0": {"loss": "0x1.8p+2", "parameters": "ab"},
        "2": {"loss": "0x1.9p+1", "parameters": "cd"},
        "3": {"loss": "0x1.ap+1", "parameters": "ef"},
    },
}
BEGINNING = RUN | {
    "losses": RUN["losses"][:2],
    "validations": {k: RUN["validations"][k] for k in ("0", "2")},
}
END = RUN | {
    "first_step": 2,
    "losses": RUN["losses"][2:],
    "validations": {k: RUN["validations"][k] for k in ("2", "3")},
}


def changed(run: dict, *path: object, value: object) -> dict:
    run = copy.deepcopy(run)
    place = run
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return run


def test_equal_runs_are_called_equal():
    assert same_bits(RUN, BEGINNING)
    assert continues(RUN, END)


@pytest.mark.parametrize(
    "path",
    [
        ("losses", 1, 1),
        ("validations", "2", "loss"),
        ("validations", "2", "parameters"),
    ],
)
def test_any_difference_is_a_difference(path):
    assert not same_bits(RUN, changed(BEGINNING, *path, value="0x1.0p+0"))


@pytest.mark.parametrize(
    "path",
    [
        ("losses", 0, 0),
        ("validations", "3", "loss"),
        ("validations", "3", "parameters"),
    ],
)
def test_any_difference_after_resuming_is_a_difference(path):
    assert not continues(RUN, changed(END, *path, value="0x1.0p+0"))


def test_nothing_is_equal_to_nothing():
    assert not same_bits(RUN, changed(BEGINNING, "losses", value=[]))
    assert not continues(RUN, changed(RUN, "first_step", value=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "--steps: expected at least 1, got 0"),
        ("--steps 4 --stop-after 5", "--stop-after: expected 1 to --steps 4, got 5"),
        ("--num-ranks 2", "--num-ranks is for --system unsharded"),
        ("--system fsdp2 --report-memory", "--report-memory is for --system lowtide"),
        ("--system unsharded --activation-checkpointing", "keeps all activations"),
    ],
)
def test_options_that_contradict_are_refused(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_bytes.py", *options.split()])
    with pytest.raises(SystemExit):
        parse_args("")
    assert message in capsys.readouterr().err
