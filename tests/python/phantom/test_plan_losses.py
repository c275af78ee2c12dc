"""`lowtide plan --loss vocabulary`: neither logits nor a whole head."""

from __future__ import annotations

import pytest

from lowtide.planning import PlanError
from support import planned

MIB = 1 << 20
MODEL = f"""
import sys; sys.path.insert(0, {str(planned.ROOT / "examples")!r})
from dataclasses import replace
from llama import CONFIGS, Llama
PLAN_HEAD = "output"
def plan_model(config, sequence):
    return Llama(replace(CONFIGS["tiny"], vocab_size=262144, max_seq_len=sequence))
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return {"path": str(path), "batch": 8, "sequence": 128, "world": 2}


def test_no_logits_and_no_whole_head(model):
    """1024 tokens by 262144 rows: 512 MiB of logits in bf16, a head of 16 MiB."""
    chunked = planned.plan_llama(**model, loss="chunked")
    rows = planned.plan_llama(**model, loss="vocabulary")
    assert chunked.peak_allocated > 128 * MIB  # an eighth of the logits, in fp32
    assert rows.peak_allocated < chunked.peak_allocated - 64 * MIB
    head = [t for t in rows.largest if t.category == "gathered_parameters"]
    assert all(tensors.bytes < 16 * MIB for tensors in head)


def test_without_sharding(model):
    rows = planned.plan_llama(**model | {"world": 1}, loss="vocabulary", system="ddp")
    assert max(tensors.bytes for tensors in rows.largest) <= 96 * MIB


def test_fsdp2_is_refused(model):
    with pytest.raises(PlanError) as raised:
        planned.plan_llama(**model, loss="vocabulary", system="fsdp2")
    assert str(raised.value) == (
        "lowtide: plan --loss vocabulary: expected --system lowtide or ddp, got "
        "fsdp2, whose head is gathered by its own forward only. Choose --loss chunked."
    )


def test_a_head_with_a_bias_is_refused(tmp_path):
    path = tmp_path / "biased.py"
    path.write_text(
        "import torch\n"
        "PLAN_HEAD = '1'\n"
        "def plan_model(config, sequence):\n"
        "    return torch.nn.Sequential(\n"
        "        torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8))\n"
    )
    with pytest.raises(PlanError) as raised:
        planned.plan_llama(path=str(path), loss="vocabulary")
    assert str(raised.value) == (
        "lowtide: plan --loss vocabulary: expected PLAN_HEAD to name an nn.Linear "
        "without bias, got '1'. Choose --loss chunked."
    )
