r"""Train a byte-level Llama on the source of Python's standard library.

    python examples/train_bytes.py
    torchrun --nproc-per-node 2 examples/train_bytes.py --sample-bytes 200
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
        --rdzv-endpoint host:29500 examples/train_bytes.py

Any number of processes and machines: NCCL where there is a GPU, else gloo.
`--system` chooses who shards; with one or two ranks it changes no bit of a loss.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

# Kineto would report on stderr that a machine has no GPU.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

import text
from checkpoint import Checkpoint
from evaluate import generate, next_byte_loss, parameters_sha256, validation_loss
from instruments import Memory, Traffic
from llama import CONFIGS, Llama, init_weights
from lowtide import memory_report
from options import parse_args
from precision import DTYPES, agreed_precision
from sharding import shard
from unsharded import UnshardedReplicas

# Counted from the first step of a run, which allocates what later ones reuse.
MEMORY_STEP, TRAFFIC_STEP = 2, 3
NOT_TIMED = (0, MEMORY_STEP - 1, MEMORY_STEP, TRAFFIC_STEP)


def main() -> None:
    args = parse_args(__doc__)
    device = join_process_group(args.threads)
    run = Run(args, device)
    run.train()
    run.report()
    leave()


def join_process_group(num_threads: int | None) -> torch.device:
    """Returns this process's device."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads or max(1, cores // local_world_size))

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    if "RANK" in os.environ:  # torchrun says where the others are
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def leave() -> None:
    """Ends the process without the interpreter's own end.

    A gloo thread may still have to release the tensors of its last collective, for
    which it needs the GIL; while the interpreter ends, that aborts the process.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Run:
    """One training run: what is trained, on what, and what was seen."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.rank = dist.get_rank()
        # A process is one data-parallel rank; the unsharded reference plays all.
        self.num_ranks = args.num_ranks or dist.get_world_size()
        self.precision = args.precision
        if self.precision == "auto":
            self.precision = agreed_precision(device)

        self.corpus = text.load(args.text)
        self.sampler = text.Sampler(
            text=self.corpus.train,
            seq_len=args.seq_len,
            batch_size=args.batch,
            num_microbatches=args.microbatches,
            num_ranks=self.num_ranks,
            seed=args.seed,
        )
        self.build()

        settings = {
            "config": args.config,
            "precision": self.precision,
            "seed": args.seed,
            "sequences a step": args.batch * args.microbatches * self.num_ranks,
            "sequence length": args.seq_len,
            "text": self.corpus.sha256,
        }
        check_agreement(settings)
        self.settings = settings
        self.checkpoint = Checkpoint(self.module, self.optimizer, settings)
        self.first_step = self.checkpoint.load(args.resume) if args.resume else 0

        self.memory = Memory(self.module, self.optimizer, device)
        self.traffic = Traffic()
        self.losses: list[list[float]] = []  # [step][rank played here]
        self.validations: dict[int, dict[str, str]] = {}
        self.seconds, self.num_timed_steps = 0.0, 0

    def build(self) -> None:
        args, dtype = self.args, DTYPES[self.precision]
        self.module = Llama(CONFIGS[args.config]).to(self.device)
        init_weights(self.module, args.seed)
        self.num_parameters = sum(p.numel() for p in self.module.parameters())
        if args.activation_checkpointing:
            for i, layer in enumerate(self.module.layers):
                self.module.layers[i] = checkpoint_wrapper(layer)

        self.model: Any = self.module
        if args.system == "unsharded":
            self.model = UnshardedReplicas(
                self.module, num_ranks=self.num_ranks, param_dtype=dtype
            )
        else:
            shard(self.module, args.system, dtype)
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(),
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )

    def train(self) -> None:
        args = self.args
        self.say(
            f"{self.num_parameters:,} parameters, {self.num_ranks} ranks, "
            f"{dist.get_backend()}, {self.precision}, "
            f"{len(self.corpus.train):,} bytes of text"
        )
        self.validate(self.first_step)
        steps = tqdm(
            range(self.first_step, args.stop_after),
            desc=args.system,
            initial=self.first_step,
            total=args.stop_after,
            disable=True if self.rank else None,  # None: only on a terminal
        )
        for step in steps:
            with self.measurement(step - self.first_step):
                self.train_step(step)
            loss, speed = self.losses[-1][0], self.tokens_per_second()
            steps.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")

            num_done = step + 1
            if num_done % args.validate_every == 0 or num_done == args.stop_after:
                self.validate(num_done)
            if args.checkpoint_dir and num_done % args.checkpoint_every == 0:
                self.checkpoint.save(args.checkpoint_dir, num_done)
                self.say(f"step {num_done}, checkpoint saved")

    def measurement(self, offset: int) -> AbstractContextManager[None]:
        if offset == MEMORY_STEP - 1:
            self.memory.start()
        if offset == MEMORY_STEP:
            return self.memory.recording()
        if offset == TRAFFIC_STEP:
            return self.traffic.counting()
        return nullcontext()

    def train_step(self, step: int) -> None:
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)

        if isinstance(self.model, UnshardedReplicas):
            losses = self.model.accumulate(lambda rank: self.backward(step, rank))
            self.model.clip_grad_norm_(self.args.clip)
        else:
            losses = [self.backward(step, self.rank)]
            nn.utils.clip_grad_norm_(self.module.parameters(), self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

        self.losses.append(losses)
        if step - self.first_step not in NOT_TIMED:
            self.seconds += time.perf_counter() - start
            self.num_timed_steps += 1

    def backward(self, step: int, rank: int) -> float:
        """Leaves one rank's gradients of a step; returns its loss."""
        num_microbatches = self.args.microbatches
        total = 0.0
        for microbatch in range(num_microbatches):
            if isinstance(self.model, FSDPModule):
                is_last = microbatch == num_microbatches - 1
                self.model.set_requires_gradient_sync(is_last)
            inputs, targets = self.sampler.batch(step, microbatch, rank)
            logits = self.model(inputs.to(self.device))
            loss = next_byte_loss(logits, targets.to(self.device)) / num_microbatches
            loss.backward()
            total += loss.item()
        return total

    def learning_rate(self, step: int) -> float:
        """Linear warmup, then a cosine down to a tenth."""
        warmup = max(1, self.args.steps // 10)
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / self.args.steps)
        return self.args.lr * min(1.0, (step + 1) / warmup) * cosine

    def validate(self, step: int) -> None:
        per_rank = -(-self.args.validation_windows // self.num_ranks)
        inputs, targets = text.evenly_spaced(
            self.corpus.validation, per_rank * self.num_ranks, self.args.seq_len
        )
        is_reference = isinstance(self.model, UnshardedReplicas)
        loss = validation_loss(
            self.model,
            inputs.to(self.device),
            targets.to(self.device),
            batch_size=self.args.batch,
            played_ranks=range(self.num_ranks) if is_reference else (self.rank,),
            num_ranks=self.num_ranks,
        )
        self.validations[step] = {"loss": loss.hex()}
        if self.args.digest:
            self.validations[step]["parameters"] = parameters_sha256(self.module)
        self.say(f"step {step}, validation loss {loss:.3f}")

    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        if not self.num_timed_steps:
            return 0.0
        tokens = self.settings["sequences a step"] * self.args.seq_len
        return tokens * self.num_timed_steps / self.seconds

    def report(self) -> None:
        sample = ""
        if self.args.sample_bytes:
            sample = generate(
                self.model,
                num_bytes=self.args.sample_bytes,
                context=self.args.seq_len,
                temperature=self.args.temperature,
                seed=self.args.seed,
                device=self.device,
            )
            self.say(f"generated text:\n{sample}")
        if self.args.report_memory:
            self.say(f"memory\n{memory_report(self.module)}")
        by_process: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_process, self.losses)
        result = {
            "system": self.args.system,
            "settings": self.settings,
            "num_ranks": self.num_ranks,
            "backend": dist.get_backend(),
            "num_parameters": self.num_parameters,
            "first_step": self.first_step,
            # [step][rank]; hexadecimal, so that nothing is rounded.
            "losses": [
                [loss.hex() for losses in step for loss in losses]
                for step in zip(*by_process, strict=True)
            ],
            "validations": self.validations,
            "tokens_per_second": self.tokens_per_second(),
            "memory": self.memory.result,
            "traffic": self.traffic.result,
            "sample": sample,
        }
        if self.rank == 0 and self.args.result:
            self.args.result.write_text(json.dumps(result, indent=1))

    def say(self, message: str) -> None:
        if self.rank == 0:
            tqdm.write(f"{self.args.system}: {message}")


def check_agreement(settings: dict[str, Any]) -> None:
    """Machines with other Python versions have other text."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, settings)
    for rank, theirs in enumerate(everyone):
        for name, value in settings.items():
            if theirs[name] != value:
                raise ValueError(
                    f"{name}: expected the same on every rank, got {value!r} (rank "
                    f"{dist.get_rank()}) and {theirs[name]!r} (rank {rank}). Start all "
                    "ranks with the same options and the same Python."
                )


if __name__ == "__main__":
    main()
