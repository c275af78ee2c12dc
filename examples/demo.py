"""What `make demo` runs: lowtide beside FSDP2 and an unsharded reference.

    python examples/demo.py [--out demo-out]

Trains a byte-level Llama on two CPU ranks, resumes it from a checkpoint taken half
way, repeats the first steps with the two other systems, and compares: every loss and
every parameter must be equal bit for bit.  Leaves with 1 if one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from comparison import LEGEND, continues, same_bits, table
from memory_plot import save_step_memory
from precision import faster_precision

HERE = Path(__file__).parent
NUM_RANKS = 2
TIMEOUT_SECONDS = 900  # of one program

console = Console(highlight=False)


def main() -> int:
    args = parse_args()
    runs, resumed = run_all(args)
    console.rule("results")
    console.print(table(runs, args.compared_steps))
    console.print(LEGEND)

    whole = runs["lowtide"]
    picture = args.out / "step_memory.png"
    save_step_memory(
        whole["memory"],
        f"lowtide: one step of {whole['num_parameters']:,} parameters, "
        f"{whole['settings']['precision']}",
        picture,
    )
    console.print(f"live bytes over one step: {picture}")
    checks = {
        f"resumed at step {args.steps // 2}": continues(whole, resumed),
        "FSDP2": same_bits(whole, runs["FSDP2"]),
        "unsharded reference": same_bits(whole, runs["unsharded"]),
    }
    for name, equal in checks.items():
        verdict = "equal bit for bit" if equal else "DIFFERENT"
        console.print(f"{name}: losses and parameters [bold]{verdict}[/]")
    return 0 if all(checks.values()) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--config", default="bytes")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--compared-steps", type=int, default=40)
    args = parser.parse_args()
    if not 3 < args.compared_steps < args.steps // 2:
        parser.error(
            "--compared-steps: expected more than 3 and less than half of --steps, "
            f"got {args.compared_steps} of {args.steps}"
        )
    return args


def run_all(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results by system, and that of the run that resumes lowtide's."""
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoints = args.out / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    half, few = args.steps // 2, args.compared_steps
    torch.set_num_threads(1)
    same = [
        f"--config={args.config}",
        f"--steps={args.steps}",
        f"--precision={faster_precision(torch.device('cpu'))}",
        f"--validate-every={few}",
        "--threads=1",
        "--digest",
    ]
    save = [f"--checkpoint-dir={checkpoints}", f"--checkpoint-every={half}"]
    show = ["--sample-bytes=300", "--report-memory"]
    resume = [f"--resume={checkpoints}/step-{half}"]
    stop = [f"--stop-after={few}"]

    def train(name: str, system: str, options: list[str]) -> dict[str, Any]:
        return run_training(system, args.out / f"{name}.json", [*same, *options])

    console.rule(f"1/5  lowtide: {args.steps} steps on {NUM_RANKS} ranks")
    lowtide = train("lowtide", "lowtide", save + show)
    console.rule(f"2/5  lowtide: new processes, from the checkpoint of step {half}")
    resumed = train("resumed", "lowtide", resume)
    console.rule(f"3/5  torch's FSDP2: the first {few} steps")
    fsdp2 = train("fsdp2", "fsdp2", stop)
    console.rule(f"4/5  one process, nothing sharded: the first {few} steps")
    unsharded = train("unsharded", "unsharded", stop)
    console.rule("5/5  host time per unit")
    for run in (lowtide, fsdp2):
        run["host_us"] = host_time(run["system"])
        console.print(f"{run['system']}: {run['host_us']:.0f} us")
    return {"lowtide": lowtide, "FSDP2": fsdp2, "unsharded": unsharded}, resumed


def run_training(system: str, result: Path, options: list[str]) -> dict[str, Any]:
    """Runs train_bytes.py to its end; returns its result file."""
    program = [str(HERE / "train_bytes.py"), f"--system={system}", *options]
    if system == "unsharded":
        program += [f"--num-ranks={NUM_RANKS}"]
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        program = [*torchrun, f"--nproc-per-node={NUM_RANKS}", *program]
    result.unlink(missing_ok=True)
    run_program([*program, f"--result={result}"])
    return json.loads(result.read_text())


def host_time(system: str) -> float:
    program = [str(HERE / "host_time.py"), f"--system={system}"]
    return json.loads(run_program(program, capture=True))["microseconds_per_unit"]


def run_program(arguments: list[str], *, capture: bool = False) -> str:
    """A Python program on this machine's CPU; it never outlives this one."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE if capture else None,
        text=True,
        env=os.environ
        | {
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.terminate()  # torchrun then ends its ranks
        process.wait()
    if process.returncode != 0:
        raise SystemExit(
            f"demo: {' '.join(arguments)}: expected exit status 0, got "
            f"{process.returncode}. Its own output is above."
        )
    return output or ""


if __name__ == "__main__":
    sys.exit(main())
