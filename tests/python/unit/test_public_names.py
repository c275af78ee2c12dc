"""The names that `import lowtide` gives: FSDP2's, our own, four modules."""

import subprocess
import sys
from types import FunctionType, ModuleType

import pytest
from torch.distributed.fsdp import FSDPModule, _fully_shard

import lowtide
from lowtide._torch_version import VERSION

FSDP2 = {
    *("fully_shard", "FSDPModule", "UnshardHandle", "register_fsdp_forward_method"),
    *("share_comm_ctx", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"),
    "DataParallelMeshDims",  # of torch 2.12
    "GradientReductionHandle",  # of torch 2.15
}
SINCE = {"DataParallelMeshDims": (2, 12), "GradientReductionHandle": (2, 15)}
PRIVATE = {"ShardPlacementResult"}  # of torch 2.12, which keeps it in a private module
OWN = {
    *("wrap", "plan", "memory_report", "abort_step", "clip_grad_norm_"),
    *("local_parameters", "sharded_optimizer", "offload_states", "step_on_device"),
    *("optimize_in_backward", "Muon", "defer_logits"),
    *("checkpoint", "tag", "ActivationPolicy"),
    *("save", "load", "step", "sleep", "wake"),
}
MODULES = {"losses", "phantom", "sequence_parallel", "spmd"}


def test_ten_of_fsdp2_twenty_of_our_own_and_four_modules():
    assert len(FSDP2) == 10 and len(OWN) == 20
    theirs = {name for name in FSDP2 if VERSION >= SINCE.get(name, (2, 11))}
    assert theirs == set(_fully_shard.__all__)
    assert sorted(lowtide.__all__) == sorted({*FSDP2, *PRIVATE, *OWN, *MODULES})


@pytest.mark.parametrize("name", _fully_shard.__all__)
def test_class_of_torchs_is_torchs_or_derived(name):
    mine, torchs = getattr(lowtide, name), getattr(_fully_shard, name)
    if name != "fully_shard":
        assert mine is torchs or issubclass(mine, torchs)


def test_methods_of_torchs_are_our_own():
    torchs = {name for name in vars(FSDPModule) if not name.startswith("_")}
    for name in torchs:
        assert vars(lowtide.FSDPModule)[name].__module__.startswith("lowtide.")
        assert "_refused" not in vars(lowtide.FSDPModule)[name].__qualname__


@pytest.mark.parametrize("name", sorted(OWN | MODULES))
def test_name_leads_to_what_it_says(name):
    kind = ModuleType if name in MODULES else (FunctionType, type)
    assert isinstance(getattr(lowtide, name), kind)
    assert name in dir(lowtide)


def test_deferred_logits_have_one_function():
    assert lowtide.defer_logits is lowtide.losses.defer_logits


def test_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="'lowtide' has no attribute 'fsdp'"):
        _ = lowtide.fsdp


PROGRAM = """
import sys, lowtide
early = [name for name in lowtide._PUBLIC_MODULES if f"lowtide.{name}" in sys.modules]
late = lowtide.phantom.timeline, lowtide.sequence_parallel.gather_policy
print(early, *(each.__name__ for each in late))
"""


def test_modules_are_imported_when_they_are_asked_for():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["[]", "timeline", "gather_policy"], done.stderr
