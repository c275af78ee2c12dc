"""torchtitan's trainer: ``torchrun ... [-m lowtide run] with_torchtitan.py FOLDER``

A small Llama of its own, checkpointed selectively; two steps, a checkpoint in FOLDER,
and two more of a trainer that resumes.
"""

import dataclasses
import sys
from collections.abc import Iterator

import torch
from bits import digest, say
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models import llama3
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import JobConfig, Trainer

SEQUENCE, BATCH, VOCABULARY = 32, 2, 128


class Tokens:
    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.step + self.rank)
            size = (BATCH, SEQUENCE + 1)
            tokens = torch.randint(0, VOCABULARY, size, generator=generator)
            self.step += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Metrics(MetricsProcessor):
    def log(self, step: int, loss: float, largest: float, norm: float, **more) -> None:
        say("step", step, "loss", float(loss), "norm", float(norm))


def main(folder: str) -> None:
    spec = llama3.get_train_spec()
    small = dataclasses.replace(
        spec.model_args["debugmodel"],
        **{"dim": 64, "n_layers": 3, "n_heads": 4, "vocab_size": VOCABULARY},
    )
    register_train_spec(
        "small",
        dataclasses.replace(
            spec,
            model_args={"small": small},
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda dp_rank, **_: Tokens(dp_rank),
            build_metrics_processor_fn=Metrics,
            state_dict_adapter=None,
        ),
    )
    for steps in (2, 4):
        config = JobConfig()
        config.job.dump_folder = folder
        config.model.name = config.model.flavor = "small"
        config.training.seq_len, config.training.local_batch_size = SEQUENCE, BATCH
        config.training.steps = steps
        config.metrics.log_freq = config.debug.seed = 1
        config.optimizer.lr = 1e-2
        config.lr_scheduler.warmup_steps = 0
        config.checkpoint.enable = True
        config.checkpoint.interval = 2
        config.checkpoint.last_save_model_only = False
        trainer = Trainer(config)
        trainer.train()
        (model,) = trainer.model_parts
        say("parameters", digest(model.parameters()))
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
