"""The training step that gpu_check runs under compute-sanitizer, over the dry
driver."""

from __future__ import annotations

from pathlib import Path

from support.gpu_check import GpuCheck


def test_each_tensor_of_the_step_is_an_allocation_of_its_own(tmp_path: Path) -> None:
    seen = GpuCheck.run(tmp_path / "out", "sanitizer-step")
    assert seen.figures["sanitizer-step"] == {"errors": 0, "found": ""}
    met = {r["quantity"]: r["value"] for r in seen.rows if r["system"] == "met"}
    assert met == {"memcheck of a training step: errors": True}
