"""What `lowtide plan` says would lower the peak does so, by about as much."""

from __future__ import annotations

import pytest

import lowtide
from lowtide.planning import Plan, Saving, verify
from support import planned

EXAMPLES = planned.ROOT / "examples"
LARGE = {"config": "bytes", "sequence": 512, "batch": 8, "world": 2}


def saving(plan: Plan, what: str) -> Saving:
    (found,) = [s for s in plan.savings if s.what == what]
    assert found.basis == "arithmetic"
    return found


def plan(**settings: object) -> Plan:
    return planned.plan_llama(**LARGE | settings)


@pytest.fixture(scope="module")
def unchecked() -> Plan:
    return plan(checkpoint="none", system="fsdp2")


def test_checkpointing(unchecked):
    advised = saving(unchecked, "checkpoint")
    assert advised.advice == "checkpoint model.layers.* (4 modules)"
    checkpointed = plan(checkpoint="full", system="fsdp2")
    saved = unchecked.peak_allocated - checkpointed.peak_allocated
    assert advised.allocated == pytest.approx(saved, rel=0.15)
    assert "checkpoint" not in {s.what for s in checkpointed.savings}


VOCABULARY = """
from dataclasses import replace
from llama import CONFIGS, Llama
PLAN_HEAD = "output"
def plan_model(config, sequence):
    return Llama(replace(CONFIGS["tiny"], vocab_size=32768, max_seq_len=sequence))
"""


def test_chunked_loss(tmp_path):
    """Logits of 4096 x 32768 are most of what this model holds."""
    path = tmp_path / "model.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})" + VOCABULARY)
    settings = {"path": str(path), "batch": 8, "sequence": 512, "world": 2}
    plain = planned.plan_llama(**settings, loss="plain")
    chunked = planned.plan_llama(**settings, loss="chunked")
    saved = plain.peak_allocated - chunked.peak_allocated
    assert saved > 0.5 * plain.peak_allocated
    assert saving(plain, "chunk_loss").allocated == pytest.approx(saved, rel=0.1)


def test_gradients_as_views_of_ddps_buckets():
    found = saving(plan(system="ddp"), "bucket_view")
    assert "gradient_as_bucket_view=True" in found.advice


def test_sharding_what_every_rank_holds_whole():
    advised = saving(plan(system="ddp"), "shard")
    assert advised.advice == "fully_shard the model over the 2 ranks"


def test_a_fused_optimizer():
    plain = lowtide.plan(planned.build, planned.step, cublas_workspace=0)
    fused = lowtide.plan(planned.build_fused, planned.step, cublas_workspace=0)
    assert plain.peak_moment == "optimizer"
    advised = saving(plain, "fused_optimizer")
    assert advised.advice == "the optimizer's fused=True"
    # fused keeps a step count of each weight on the device, 512 bytes.
    less = plain.peak_allocated - fused.peak_allocated
    assert advised.allocated == less + 2 * 512


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


def test_gradients_that_wait_for_the_last_microbatch():
    waiting = plan(system="lowtide", microbatches=2)
    assert saving(waiting, "gradient_sync").allocated > 0


def test_a_unit_for_the_embedding():
    together = planned.plan_script("train_fsdp2.py", "1024", world=4)
    advised = saving(together, "own_unit")
    assert advised.advice == "make embed a unit of its own, apart from the root"
    assert advised.allocated == 4096 * 1024 * 2  # bf16


def test_verified_by_a_second_run(unchecked):
    request = planned.llama_request(**LARGE, checkpoint="none", system="fsdp2")
    (checkpoint,) = [
        s for s in verify(unchecked, request).savings if s.what == "checkpoint"
    ]
    checkpointed = plan(checkpoint="full", system="fsdp2").peak_allocated
    assert checkpoint.by_run == unchecked.peak_allocated - checkpointed


def test_largest_savings_come_first(unchecked):
    bytes_saved = [s.allocated for s in unchecked.savings if s.basis == "arithmetic"]
    assert bytes_saved == sorted(bytes_saved, reverse=True)
    assert bytes_saved[0] > 0.01 * unchecked.peak_allocated
