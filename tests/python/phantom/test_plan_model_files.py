"""What a model file's options do to the figures, and what a plan says would lower the
peak: it does so, by about as much."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from llama import CONFIGS, Llama
from lowtide.planning import Plan, Saving, verify
from support import planned

MIB = 1 << 20
LARGE = {"config": "bytes", "sequence": 512, "batch": 8, "world": 2}


def plan(**settings: object) -> Plan:
    return planned.plan_llama(**LARGE | settings)


def saving(plan: Plan, what: str) -> Saving:
    (found,) = [s for s in plan.savings if s.what == what]
    assert found.basis == "arithmetic"
    return found


def num_parameters() -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Llama(CONFIGS["bytes"]).parameters())


@pytest.fixture(scope="module")
def unchecked() -> Plan:
    return plan(checkpoint="none", system="fsdp2")


# -- sharding -----------------------------------------------------------------------


@pytest.mark.parametrize("system", ["lowtide", "fsdp2"])
def test_every_category_of_a_sharded_llama(system):
    microbatches = {"lowtide": 2, "fsdp2": 1}[system]
    found = plan(system=system, microbatches=microbatches)
    assert {"parameters", "optimizer_state"} <= set(found.by_category)
    assert found.moments["backward"].by_category["gathered_parameters"] > 0
    assert found.by_category.get("other", 0) == 0
    assert 1 <= found.by_category["parameters"] / (2 * num_parameters()) < 1.01
    assert (found.lowtide is not None) == (system == "lowtide")


def test_lowtides_ledger_agrees_with_the_allocator():
    found = plan(system="lowtide", microbatches=2)
    ledger = found.lowtide["categories"]
    held = found.moments["optimizer"].by_category
    # Each of seven units' shards is rounded up to 512 bytes.
    assert 0 <= held["parameters"] - ledger["parameters"]["live"] < 7 * 512


def test_gradients_that_wait_for_the_last_microbatch():
    waiting = plan(system="lowtide", microbatches=2)
    slab = waiting.moments["forward"].by_category["full_gradients"]
    # The allocator leaves a large block whole where less than 1 MiB would be left.
    assert 0 <= slab - 4 * num_parameters() < 1.1 * MIB
    assert saving(waiting, "gradient_sync").allocated > 0


def test_ddp():
    found = plan(system="ddp")
    view = saving(found, "bucket_view")
    assert "gradient_as_bucket_view=True" in view.advice
    shard = saving(found, "shard")
    assert shard.advice == "fully_shard the model over the 2 ranks"
    held = ("parameters", "gradients", "optimizer_state")
    # From half of what every rank holds whole; its buckets remain.
    assert shard.allocated <= sum(found.by_category[each] for each in held) / 2


def test_a_unit_for_the_embedding():
    together = planned.plan_script("train_fsdp2.py", "1024", world=4)
    advised = saving(together, "own_unit")
    assert advised.advice == "make embed a unit of its own, apart from the root"
    assert advised.allocated == 4096 * 1024 * 2  # bf16


# -- checkpointing ------------------------------------------------------------------


def test_checkpointing_turns_activations_into_recomputed_ones(unchecked):
    some = plan(checkpoint="selective", system="fsdp2")
    again = plan(checkpoint="full", system="fsdp2")

    def at_the_loss(plan: Plan) -> int:
        return plan.moments["loss"].by_category["activations"]

    assert at_the_loss(again) < at_the_loss(some) < at_the_loss(unchecked)
    assert again.peak_allocated < some.peak_allocated < unchecked.peak_allocated
    assert "recomputed" not in unchecked.moments["backward"].by_category


def test_checkpointing_as_advised(unchecked):
    advised = saving(unchecked, "checkpoint")
    assert advised.advice == "checkpoint model.layers.* (4 modules)"
    checkpointed = plan(checkpoint="full", system="fsdp2")
    saved = unchecked.peak_allocated - checkpointed.peak_allocated
    assert advised.allocated == pytest.approx(saved, rel=0.15)
    assert "checkpoint" not in {s.what for s in checkpointed.savings}


def test_verified_by_a_second_run(unchecked):
    alone = dataclasses.replace(unchecked, savings=[saving(unchecked, "checkpoint")])
    request = planned.llama_request(**LARGE, checkpoint="none", system="fsdp2")
    with planned.no_workspaces():
        (verified,) = verify(alone, request).savings
    checkpointed = plan(checkpoint="full", system="fsdp2").peak_allocated
    assert verified.by_run == unchecked.peak_allocated - checkpointed


def test_offloading_the_residual(unchecked):
    checkpointed = plan(checkpoint="full", loss="chunked", batch=16)
    advised = saving(checkpointed, "offload")
    assert advised.advice == (
        "offload the inputs of model.layers.* (the residual) to the host"
    )
    # All but two of the four.
    residual = 16 * 512 * 192 * 2
    assert 0 < advised.allocated <= 2 * residual
    assert "offload" not in {s.what for s in unchecked.savings}


def test_largest_savings_come_first(unchecked):
    bytes_saved = [s.allocated for s in unchecked.savings if s.basis == "arithmetic"]
    assert bytes_saved == sorted(bytes_saved, reverse=True)
    assert bytes_saved[0] > 0.01 * unchecked.peak_allocated


# -- losses -------------------------------------------------------------------------

VOCABULARY = f"""
import sys; sys.path.insert(0, {str(planned.ROOT / "examples")!r})
from dataclasses import replace
from llama import CONFIGS, Llama
PLAN_HEAD = "output"
def plan_model(config, sequence):
    return Llama(
        replace(CONFIGS["tiny"], dim=512, vocab_size=65536, max_seq_len=sequence))
"""


@pytest.fixture(scope="module")
def by_loss(tmp_path_factory) -> Callable[..., Plan]:
    """8192 tokens by 65536 rows: logits are 2 GiB in fp32, an eighth of them 256 MiB;
    the head is 64 MiB."""
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(VOCABULARY)
    model = {"path": str(path), "batch": 8, "sequence": 1024, "world": 2}
    return lambda loss, **others: planned.plan_llama(**model | others, loss=loss)


@pytest.mark.slow
def test_chunked_loss_as_advised(by_loss):
    plain, chunked = by_loss("plain"), by_loss("chunked")
    saved = plain.peak_allocated - chunked.peak_allocated
    assert saved > 0.5 * plain.peak_allocated
    assert saving(plain, "chunk_loss").allocated == pytest.approx(saved, rel=0.1)


@pytest.mark.slow
def test_rows_of_the_vocabulary_have_no_logits_and_no_whole_head(by_loss):
    chunked, rows = by_loss("chunked"), by_loss("vocabulary")
    assert max(tensors.bytes for tensors in chunked.largest) == 256 * MIB
    assert max(tensors.bytes for tensors in rows.largest) <= 64 * MIB
    assert rows.peak_allocated < 0.7 * chunked.peak_allocated


def test_rows_of_the_vocabulary_without_sharding(by_loss):
    rows = by_loss("vocabulary", world=1, system="ddp")
    # DDP's bucket has all gradients in fp32; the logits alone would be 2 GiB.
    assert max(tensors.bytes for tensors in rows.largest) < 300 * MIB
