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
    return Llama(
        replace(CONFIGS["tiny"], dim=512, vocab_size=65536, max_seq_len=sequence))
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return {"path": str(path), "batch": 8, "sequence": 1024, "world": 2}


def test_no_logits_and_no_whole_head(model):
    """8192 tokens by 65536 rows: an eighth of the logits is 256 MiB in fp32; the head
    is 64 MiB."""
    chunked = planned.plan_llama(**model, loss="chunked")
    rows = planned.plan_llama(**model, loss="vocabulary")
    assert max(tensors.bytes for tensors in chunked.largest) == 256 * MIB
    assert max(tensors.bytes for tensors in rows.largest) <= 64 * MIB
    assert rows.peak_allocated < 0.7 * chunked.peak_allocated


def test_without_sharding(model):
    rows = planned.plan_llama(**model | {"world": 1}, loss="vocabulary", system="ddp")
    # DDP's bucket has all gradients in fp32; the logits alone would be 1 GiB.
    assert max(tensors.bytes for tensors in rows.largest) < 300 * MIB


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
