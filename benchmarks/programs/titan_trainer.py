"""torchtitan's own trainer on tokens drawn by step and rank: run by unedited.py.

titan_trainer.py MODEL FLAVOR [--fake RANKS] [torchtitan's option ...]

JSON of rank 0: loss and norm of each step with all their digits, a digest of the
parameters, peaks in bytes of each step. With ``--fake`` it is rank 0 of so many on
torch's `fake` group.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from support.titan_on_cpus import stand_in_for_absent

stand_in_for_absent()

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.protocols.train_spec import (  # noqa: E402
    get_train_spec,
    register_train_spec,
)
from torchtitan.train import Trainer  # noqa: E402

PLACES = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}


class Tokens:
    def __init__(self, rank: int, batch: int, length: int, vocabulary: int) -> None:
        self.rank, self.size, self.vocabulary = rank, (batch, length + 1), vocabulary

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        step = 0
        while True:
            generator = torch.Generator().manual_seed(1000 * step + self.rank)
            tokens = torch.randint(0, self.vocabulary, self.size, generator=generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]
            step += 1


class Metrics(MetricsProcessor):
    """What the trainer has to log of each step."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.steps: list[dict[str, float]] = []

    def log(self, step: int, loss: float, largest: float, norm: float, **_) -> None:
        peaks = torch.cuda.memory_stats()
        self.steps.append(
            {
                "loss": float(loss),
                "norm": float(norm),
                "reserved": peaks["reserved_bytes.all.peak"],
                "allocated": peaks["allocated_bytes.all.peak"],
            }
        )
        torch.cuda.reset_peak_memory_stats()


def main(model: str, flavor: str, options: list[str]) -> None:
    os.environ.update({name: os.environ.get(name, at) for name, at in PLACES.items()})
    if options[:1] == ["--fake"]:
        os.environ["NGPU"] = options[1]
        options = ["--comm.mode", "fake_backend", *options[2:]]
    config = ConfigManager().parse_args(
        ["--model.name", model, "--model.flavor", flavor, *options]
    )
    spec = get_train_spec(model)
    training, vocabulary = config.training, spec.model_args[flavor].vocab_size
    size = (training.local_batch_size, training.seq_len, vocabulary)
    register_train_spec(
        config.model.name + "_on_tokens",
        dataclasses.replace(
            spec,
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda dp_rank, **_: Tokens(dp_rank, *size),
            build_metrics_processor_fn=Metrics,
            state_dict_adapter=None,
        ),
    )
    config.model.name += "_on_tokens"
    config.metrics.log_freq = 1
    trainer = Trainer(config)
    trainer.train()
    said = {
        "steps": trainer.metrics_processor.steps,
        "parameters": digest(trainer.model_parts),
    }
    if dist.get_rank() == 0:
        print(json.dumps(said), flush=True)
    trainer.close()
    dist.destroy_process_group()


def digest(parts: list[torch.nn.Module]) -> str:
    """Of the bits of whole parameters, "" where no other rank has them."""
    if dist.get_backend() == "fake":
        return ""
    bits = hashlib.sha256()
    for part in parts:
        for parameter in part.parameters():
            whole = getattr(parameter, "full_tensor", lambda p=parameter: p)()
            bits.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy())
    return bits.hexdigest()[:16]


if __name__ == "__main__":
    main(*sys.argv[1:3], sys.argv[3:])
