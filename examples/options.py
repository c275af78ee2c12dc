"""The options of train_bytes.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from llama import CONFIGS
from precision import DTYPES

SYSTEMS = ("lowtide", "fsdp2", "unsharded")


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser.add_argument_group("model and data").add_argument)
    add_training_options(parser.add_argument_group("training").add_argument)
    add_output_options(parser.add_argument_group("checkpoints and output").add_argument)
    args = parser.parse_args()

    for name in ("steps", "batch", "microbatches", "seq_len", "validate_every"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option}: expected at least 1, got {getattr(args, name)}")
    if args.stop_after is None:
        args.stop_after = args.steps
    if not 0 < args.stop_after <= args.steps:
        parser.error(
            f"--stop-after: expected 1 to --steps {args.steps}, got {args.stop_after}"
        )
    if args.report_memory and args.system != "lowtide":
        parser.error("--report-memory is for --system lowtide")
    if args.system == "unsharded":
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            parser.error("--system unsharded is one process: start it without torchrun")
        if args.activation_checkpointing:
            parser.error("--system unsharded keeps all activations")
    elif args.num_ranks is not None:
        parser.error("--num-ranks is for --system unsharded: else torchrun decides")
    return args


def add_model_options(add) -> None:
    add("--system", choices=SYSTEMS, default="lowtide", help="who shards")
    add("--num-ranks", type=int, help="ranks that --system unsharded plays")
    add("--config", choices=tuple(CONFIGS), default="bytes")
    add("--precision", choices=("auto", *DTYPES), default="auto")
    add("--activation-checkpointing", action="store_true")
    add("--text", type=Path, help="folder of *.py files, default the standard library")
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="per process, default cores / local processes")


def add_training_options(add) -> None:
    add("--steps", type=int, default=400, help="length of the learning-rate schedule")
    add("--stop-after", type=int, help="leave after this step, default --steps")
    add("--batch", type=int, default=4, help="sequences per rank and microbatch")
    add("--microbatches", type=int, default=1, help="per step; reduced after the last")
    add("--seq-len", type=int, default=128, help="bytes")
    add("--lr", type=float, default=2e-3, help="after warmup over 1/10 of the steps")
    add("--clip", type=float, default=1.0, help="largest gradient norm")


def add_output_options(add) -> None:
    add("--validate-every", type=int, default=100, help="steps")
    add("--validation-windows", type=int, default=64, help="rounded up per rank")
    add("--digest", action="store_true", help="hash the parameters when validating")
    add("--checkpoint-dir", type=Path, help="on a file system that all ranks share")
    add("--checkpoint-every", type=int, default=200, help="steps")
    add("--resume", type=Path, help="one checkpoint: <checkpoint-dir>/step-<n>")
    add("--sample-bytes", type=int, default=0, help="of text to generate at the end")
    add("--temperature", type=float, default=0.6, help="0 takes the likeliest byte")
    add("--report-memory", action="store_true", help="what lowtide holds, as a table")
    add("--result", type=Path, help="JSON file that rank 0 writes")
