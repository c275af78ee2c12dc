"""Allocations of one steady step, as JSON: torch's by c10, and lowtide's leases.

The models and the group of `host_models`: nothing is allocated by another thread.
"""

from __future__ import annotations

import gc
import json
import sys

import torch
import torch.distributed as dist
from host_models import SYSTEMS, Training, start

from lowtide import _C
from lowtide._base.memory import ledger
from lowtide.memory import CATEGORIES

NUM_STEPS = 4
CPU = torch.device("cpu")


def count(system: str, num_layers: int) -> dict[str, int]:
    training = Training(system, num_layers)
    book = ledger(CPU)
    for _ in range(NUM_STEPS):
        gc.collect()
        book.reset_peaks()
        # An event is an allocation, a release, or a lease's beginning or end.
        with _C.AllocationTimeline(CPU, book) as timeline:
            training.forward()
            training.backward()
            training.finish()
        leases = sum(book.num_leases(name) for name in CATEGORIES)
    samples = timeline.samples()
    assert samples["other"][-1] == 0, "what a step allocates it also releases"
    return {
        "events": samples["event"][-1],
        "leases": leases,
    }


def main() -> None:
    num_layers = int(sys.argv[1])
    start()
    print(json.dumps({name: count(name, num_layers) for name in SYSTEMS}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
