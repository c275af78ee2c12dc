"""docs/sequence_parallel.md: its program runs, its table is the stored figures'."""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.commands import one_agent, run_together

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "sequence_parallel.md"
RESULTS = ROOT / "benchmarks" / "results" / "case3_gather.json"


def test_the_program_runs_on_two_ranks(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = tmp_path / "mlp.py"
    program.write_text(code)
    command = [*one_agent(2), str(program)]
    (printed,) = run_together([command], timeout=240, folder=tmp_path)
    for rank in range(2):
        assert f"rank {rank}: gradient (128, 2, 64)" in printed


def test_the_table_is_of_the_stored_figures() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    stored = {
        row["quantity"]: row["value"]
        for row in rows
        if row["system"] == "lowtide" and "less held" in row["quantity"]
    }
    for config, layers in (("8B", 32), ("70B", 80)):
        cells = [stored[f"{config}, t {t}: less held, {layers} layers"] for t in (4, 8)]
        line = f"| {config} Llama, less than with the gathered tensors | "
        assert (
            line + " | ".join(f"{cell:.1f} GiB" for cell in cells) in PAGE.read_text()
        )


def test_the_stored_figures_are_those_of_the_case() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    ours = {r["quantity"]: r["value"] for r in rows if r["system"] == "lowtide"}
    for config in ("8B", "70B"):
        for t in (4, 8):
            share = ours[f"{config}, t {t}: a site holds of its gathered bytes"]
            assert share == 1 / t
    assert ours["8B, t 4: less held, 32 layers"] == 3.0
    assert ours["8B, t 8: less held, 32 layers"] == 3.5
    assert ours["70B, t 4: less held, 80 layers"] == 15.0
    assert ours["70B, t 8: less held, 80 layers"] == 17.5
    for world in (2, 4):
        for dtype in ("fp32", "bf16"):
            where = f"gloo, {world} ranks, {dtype}: "
            for site in ("attn_in", "ffn_in"):
                assert ours[f"{where}gathers of '{site}' a block in backward"] == 1.0
            equal = "loss and gradients equal gather saved's bit for bit"
            assert ours[where + equal] is True
            for kind in ("all-gathers", "reduce-scatters"):
                assert ours[f"{where}{kind} a block, forward"] == 2.0
            assert ours[where + "all-gathers a block, backward"] == 2.0 + 2.0
