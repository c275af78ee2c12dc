"""Simulated time of a training step of a Llama, as JSON; dry:

    python -m lowtide phantom --gpu h100 --world 8 -- \\
        llama_time.py --system lowtide --config 8b --world 8 [...]

The models, systems and their options are those of llama_memory.py. The third step is
reported: the optimizer has its state, and lowtide knows the order of gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import Any

import torch
from llama_memory import (
    NUM_STEPS,
    WRAP,
    build,
    clip,
    make_optimizer,
    parser,
    set_sync,
    tune,
)
from stage import start

import lowtide.phantom
from lowtide.phantom import machines


def options() -> argparse.Namespace:
    also = parser()
    also.add_argument("--ranks-per-node", type=int, help="instead of the GPU's")
    also.add_argument("--link", type=float, help="GB/s between nodes")
    also.add_argument(
        "--shared", action="store_true", help="one communicator, LOWTIDE_COMMUNICATORS"
    )
    also.add_argument("--trace", help="file for a Chrome trace of the last step")
    also.add_argument("--picture", help="file for a picture of the last step")
    return also.parse_args()


def train(args: argparse.Namespace, time: lowtide.phantom.timeline) -> None:
    model: Any = WRAP[args.system](build(args), args)
    # The head belongs to the loss, whose chunks hold both.
    model.norm.register_forward_hook(lambda *_: time.phase("loss"))
    optimizer = make_optimizer(model, args)
    for _ in range(NUM_STEPS):
        time.begin_step()
        for microbatch in range(args.microbatches):
            with set_sync(model, microbatch == args.microbatches - 1):
                time.phase("forward")
                shape = (1, args.sequence + 1)
                tokens = torch.zeros(*shape, dtype=torch.long, device="cuda")
                loss = model(tokens[:, :-1], tokens[:, 1:])
                time.phase("backward")
                loss.backward()
                del loss, tokens
        time.phase("optimizer")
        clip(model, args)
        optimizer.step()
        optimizer.zero_grad()
        if args.system == "lowtide":
            tune(model, args)


def main() -> None:
    args = options()
    if args.shared:
        os.environ["LOWTIDE_COMMUNICATORS"] = "shared"
    start(args.world, expandable=args.expandable)
    network = machines.DGX
    if args.link is not None:
        between = args.link * 1e9
        network = dataclasses.replace(network, bandwidth_between_nodes=between)
    with lowtide.phantom.timeline(
        network=network, ranks_per_node=args.ranks_per_node
    ) as time:
        train(args, time)
    if args.trace:
        time.chrome_trace(args.trace, step=-1)
    if args.picture:
        time.picture(args.picture)
    json.dump(time.report().to_dict(), sys.stdout)


if __name__ == "__main__":
    main()
