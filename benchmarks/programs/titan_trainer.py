"""torchtitan's own trainer (0.2) on tokens drawn by step and rank: run by unedited.py.

titan_trainer.py MODEL FLAVOR [--fake RANKS] [torchtitan's option ...]

JSON of rank 0: loss and norm of each step with all their digits, a digest of the
parameters, peaks in bytes of each step. With ``--fake`` it is rank 0 of so many on
torch's `fake` group.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.titan_on_cpus import HAS_CONFIGS, Batches, stand_in_for_absent

if HAS_CONFIGS:
    sys.exit(
        "lowtide: titan_trainer: expected torchtitan 0.2, got a later one. Install "
        "requirements/torchtitan-0.2.txt beside torch 2.11."
    )
stand_in_for_absent()
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.protocols.train_spec import (  # noqa: E402
    get_train_spec,
    register_train_spec,
)
from torchtitan.train import Trainer  # noqa: E402

from frameworks.bits import digest  # noqa: E402

PLACES = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}


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
    size = (training.local_batch_size, training.seq_len + 1)
    register_train_spec(
        config.model.name + "_on_tokens",
        dataclasses.replace(
            spec,
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda dp_rank, **_: Batches(dp_rank, size, vocabulary),
            build_metrics_processor_fn=Metrics,
            state_dict_adapter=None,
        ),
    )
    config.model.name += "_on_tokens"
    config.metrics.log_freq = 1
    trainer = Trainer(config)
    trainer.train()
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    said = {
        "steps": trainer.metrics_processor.steps,
        # No other rank of a fake group has the rest.
        "parameters": "" if dist.get_backend() == "fake" else digest(parameters),
    }
    if dist.get_rank() == 0:
        print(json.dumps(said), flush=True)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], sys.argv[3:])
