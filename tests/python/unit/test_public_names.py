"""The names that `import lowtide` gives: FSDP2's, ten of our own and four modules."""

import subprocess
import sys
from types import FunctionType, ModuleType

import pytest
from torch.distributed.fsdp import _fully_shard

import lowtide

OWN = {
    *("wrap", "plan", "memory_report", "abort_step", "clip_grad_norm_"),
    *("local_parameters", "sharded_optimizer"),
    *("checkpoint", "tag", "ActivationPolicy"),
}
MODULES = {"losses", "phantom", "sequence_parallel", "spmd"}


def test_eight_of_fsdp2_ten_of_our_own_and_four_modules():
    assert len(_fully_shard.__all__) == 8 and len(OWN) == 10
    assert sorted(lowtide.__all__) == sorted({*_fully_shard.__all__, *OWN, *MODULES})


@pytest.mark.parametrize("name", sorted(OWN | MODULES))
def test_name_leads_to_what_it_says(name):
    kind = ModuleType if name in MODULES else (FunctionType, type)
    assert isinstance(getattr(lowtide, name), kind)
    assert name in dir(lowtide)


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
