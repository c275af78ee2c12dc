"""What `make demo` runs: lowtide beside FSDP2 and an unsharded reference.

    python examples/demo.py [--out demo-out]

Trains a byte-level Llama on two CPU ranks, resumes it from a checkpoint taken half
way, repeats the first steps with the two other systems, and compares: every loss and
every parameter must be equal bit for bit.  Leaves with 1 if one is not.  Then plans a
step of Llama-3-8B on 8 GPUs, where the bytes are that lowtide is for.
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
from memory_plot import GIB, save_memory
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

    plans = plan_large(args.out)
    whole = runs["lowtide"]
    picture = args.out / "step_memory.png"
    save_memory(
        whole["memory"],
        runs["FSDP2"]["memory"],
        f"lowtide: {whole['num_parameters']:,} parameters, "
        f"{whole['settings']['precision']}",
        plans,
        picture,
    )
    console.print(f"bytes over one step: {picture}")
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

    console.rule(f"1/6  lowtide: {args.steps} steps on {NUM_RANKS} ranks")
    lowtide = train("lowtide", "lowtide", save + show)
    console.rule(f"2/6  lowtide: new processes, from the checkpoint of step {half}")
    resumed = train("resumed", "lowtide", resume)
    console.rule(f"3/6  torch's FSDP2: the first {few} steps")
    fsdp2 = train("fsdp2", "fsdp2", stop)
    console.rule(f"4/6  one process, nothing sharded: the first {few} steps")
    unsharded = train("unsharded", "unsharded", stop)
    console.rule("5/6  host time per unit")
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


# Llama-3-8B, one sequence of 8192 tokens a GPU, blocks checkpointed, AdamW.
LARGE = ("--config=8b", "--world=8", "--gpu=h100", "--loss=chunked")


def plan_large(out: Path) -> dict[str, dict[str, Any]]:
    """What `lowtide plan` says of a model that does not fit here, by system; nothing
    where torch is a CPU build."""
    console.rule("6/6  Llama-3-8B on 8 H100s, planned: no GPU is needed")
    if torch.version.cuda is None:
        console.print("left out: it needs a CUDA build of torch, as pip installs it")
        return {}
    plans = {}
    for name, system in (("lowtide", "lowtide"), ("FSDP2", "fsdp2")):
        result = out / f"plan_{system}.json"
        options = [f"--system={system}", *LARGE, f"--json={result}"]
        run_program(
            ["-m", "lowtide", "plan", *options, str(HERE / "llama.py")], quiet=True
        )
        plans[name] = plan = json.loads(result.read_text())
        console.print(
            f"{name}: {plan['peak_reserved'] / GIB:.1f} GiB reserved, "
            f"{plan['peak_allocated'] / GIB:.1f} allocated (simulated)"
        )
    return plans


def host_time(system: str) -> float:
    program = [str(HERE / "host_time.py"), f"--system={system}"]
    return json.loads(run_program(program, capture=True))["microseconds_per_unit"]


def run_program(
    arguments: list[str], *, capture: bool = False, quiet: bool = False
) -> str:
    """A Python program on this machine's CPU; it never outlives this one."""
    output_to = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE if capture else output_to,
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
