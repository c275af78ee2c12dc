"""What the loss says to wrong arguments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.losses import linear_cross_entropy
from lowtide.losses._checks import check_targets

X, W, Y = torch.zeros(6, 4), torch.zeros(10, 4), torch.zeros(6, dtype=torch.int64)
START = "lowtide: linear_cross_entropy: "


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden": torch.zeros(())},
            "hidden: expected shape [..., features], got []. Unsqueeze.",
        ),
        (
            {"weight": torch.zeros(4, 10)},
            "weight: expected shape [vocabulary >= 1, 4] (hidden is [6, 4]), got "
            "[4, 10]. Transpose it if needed.",
        ),
        (
            {"weight": torch.zeros(0, 4)},
            "weight: expected shape [vocabulary >= 1, 4] (hidden is [6, 4]), got "
            "[0, 4]. Transpose it if needed.",
        ),
        (
            {"weight": W.to(torch.bfloat16)},
            "weight: expected hidden's dtype torch.float32, got torch.bfloat16. Cast "
            "one of them, or use autocast.",
        ),
        (
            {"weight": nn.Bilinear(4, 4, 10)},
            "weight: expected a tensor, or an nn.Linear with its class's forward, got "
            "Bilinear. Pass its weight.",
        ),
        (
            {"weight": Scaled(4, 10)},
            "weight: expected a tensor, or an nn.Linear with its class's forward, got "
            "Scaled. Pass its weight.",
        ),
        (
            {"weight": nn.Linear(4, 10), "bias": torch.zeros(10)},
            "bias: expected None with an nn.Linear, got a tensor. Pass head.weight "
            "instead.",
        ),
        (
            {"weight": W.to("meta")},
            "weight: expected device cpu, got meta. Move it.",
        ),
        (
            {"bias": torch.zeros(9)},
            "bias: expected shape [10], got [9]. Pass one number per class.",
        ),
        (
            {"targets": Y[:5]},
            "targets: expected shape [6] (hidden is [6, 4]), got [5]. Pass one class "
            "per token.",
        ),
        (
            {"targets": Y.int()},
            "targets: expected int64 class indices, got torch.int32. Cast them.",
        ),
        (
            {"hidden": X.int()},
            "hidden: expected one of torch.float32, torch.bfloat16, torch.float16, "
            "torch.float64, got torch.int32. Cast it.",
        ),
        (
            {"targets": Y + 10},
            "targets: expected class indices in [0, 10) or ignore_index (-100), got 10 "
            "at token 0. Pass ignore_index, or a head with as many rows as there are "
            "classes.",
        ),
        (
            {"targets": Y - 1, "ignore_index": -2, "chunking": "tokens"},
            "targets: expected class indices in [0, 10) or ignore_index (-2), got -1 "
            "at token 0. Pass ignore_index, or a head with as many rows as there are "
            "classes.",
        ),
        (
            {"label_smoothing": 1.5},
            "label_smoothing: expected a number in [0, 1], got 1.5. See its "
            "documentation.",
        ),
        (
            {"z_loss": float("nan")},
            "z_loss: expected a number >= 0, got nan. See its documentation.",
        ),
        (
            {"reduction": "max"},
            "reduction: expected 'mean', 'sum' or 'none', got 'max'. See its "
            "documentation.",
        ),
        (
            {"reduction": "none", "chunking": "tokens"},
            "reduction: expected 'mean' or 'sum' with chunking='tokens', whose forward "
            "has the gradients, got 'none'. Choose chunking='vocabulary'.",
        ),
        (
            {"chunking": "both"},
            "chunking: expected 'vocabulary' or 'tokens', got 'both'. See its "
            "documentation.",
        ),
        (
            {"chunking": "tokens", "vocab_chunk": 8},
            "vocab_chunk: expected None with chunking='tokens', which has the whole "
            "vocabulary in a tile, got 8. Choose chunking='vocabulary'.",
        ),
        (
            {"token_chunk": 0},
            "token_chunk: expected at least 1, or None for the default, got 0. See its "
            "documentation.",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_argument(changes, message):
    arguments = {"hidden": X, "weight": W, "targets": Y} | changes
    with pytest.raises(ValueError) as error:  # noqa: PT011
        linear_cross_entropy(**arguments)
    assert str(error.value) == START + message


def test_hooks_of_a_head_that_would_not_run():
    head = nn.Linear(4, 10)
    head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="without forward hooks") as error:
        linear_cross_entropy(X, head, Y)
    assert str(error.value) == (
        START + "weight: expected an nn.Linear without forward hooks, which would not "
        "run, got 1. Pass head.weight, or remove the hooks."
    )


def test_on_other_devices_targets_are_checked_there():
    """No wait for the device: on meta there is nothing to wait for."""
    check_targets(torch.full((3,), 99, device="meta"), 10, -100)


@pytest.fixture
def group(tmp_path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sharded_weight(group):
    head = nn.Linear(4, 10)
    lowtide.fully_shard(head)
    with pytest.raises(ValueError, match="expected a plain tensor") as error:
        linear_cross_entropy(X, head.weight, Y)
    assert str(error.value) == (
        START + "weight: expected a plain tensor, got a DTensor [10, 4] placed as "
        "(Shard(dim=0),). Call the loss inside the forward of the head's unit, or "
        "unshard() the unit first."
    )


def test_a_head_that_is_resharded_before_backward(group):
    head = nn.Linear(4, 10)
    lowtide.fully_shard(head)
    head(X)
    assert isinstance(head, lowtide.FSDPModule)
    head.unshard()
    loss = linear_cross_entropy(X, head, Y)
    head.reshard()
    with pytest.raises(RuntimeError, match="expected a read while its unit"):
        loss.backward()
