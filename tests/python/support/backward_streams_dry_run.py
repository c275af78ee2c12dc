"""Steps whose backward() is called on another stream than their forward's.

    python backward_streams_dry_run.py    prints {kind: [forward's, backward's]}: how
                                          many collectives these streams do not come
                                          after when backward() has returned, at most

Nothing waits for the other stream, as for a program that only backwards use, so
what lowtide frees on the stream of the forward must be ordered there.
Over the dry driver.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from support.cuda_steps import KINDS, start
from support.nccl_dry_run import unseen

STEPS = 2


def most_unseen(make: Callable[..., Callable[[], None]]) -> list[int]:
    found = [[0, 0]]
    aside = torch.cuda.Stream()
    backward = torch.Tensor.backward

    def backward_aside(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        home = torch.cuda.current_stream()
        aside.wait_stream(home)
        with torch.cuda.stream(aside):
            backward(loss, *args, **kwargs)
            found.append([0, unseen()])
        found[-1][0] = unseen()

    step = make()
    torch.Tensor.backward = backward_aside  # type: ignore[method-assign]
    try:
        for _ in range(STEPS):
            step()
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    assert len(found) > STEPS
    return [max(counts) for counts in zip(*found, strict=True)]


def main() -> None:
    start()
    print(json.dumps({kind: most_unseen(make) for kind, make in KINDS.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
