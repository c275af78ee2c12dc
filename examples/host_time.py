"""Microseconds of CPU that sharding adds to each unit, in forward and backward.

    python examples/host_time.py --system lowtide

A process group that does nothing (`fake`) and tensors so small that computing
takes no time leave the system's own work: hooks, autograd nodes, bookkeeping.
The same model without sharding is timed in between and subtracted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from evaluate import next_byte_loss
from llama import Llama, LlamaConfig, init_weights
from sharding import shard

CONFIG = LlamaConfig(16, 16, 16, 2, 1, 32, max_seq_len=8)
NUM_UNITS = CONFIG.num_layers + 1
WORLD_SIZE = 8
NUM_STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", choices=("lowtide", "fsdp2"), default="lowtide")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)

    plain, sharded = Llama(CONFIG), Llama(CONFIG)
    for model in (plain, sharded):
        init_weights(model, seed=0)
    shard(sharded, args.system, torch.bfloat16)
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()

    added = []
    for _ in range(NUM_STEPS):
        added.append(seconds(sharded) - seconds(plain))
    microseconds = 1e6 * statistics.median(added[NUM_STEPS // 4 :]) / NUM_UNITS
    print(json.dumps({"system": args.system, "microseconds_per_unit": microseconds}))
    dist.destroy_process_group()


def seconds(model: Llama) -> float:
    tokens = torch.zeros(1, CONFIG.max_seq_len, dtype=torch.long)
    start = time.process_time()
    next_byte_loss(model(tokens), tokens).backward()
    elapsed = time.process_time() - start
    model.zero_grad()
    return elapsed


if __name__ == "__main__":
    main()
