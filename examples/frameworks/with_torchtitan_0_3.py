"""torchtitan's trainer from 0.3 on, with torch 2.12 or later:
``torchrun ... [-m lowtide run] with_torchtitan_0_3.py FOLDER [STEPS]``

Four steps of the Llama that its authors debug with, checkpointed selectively and with
the loss by chunks; its checkpoints are in FOLDER, from which another run, told of more
STEPS, goes on.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bits import digest, say
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.llama3.config_registry import llama3_debugmodel

SEQUENCE, BATCH, VOCABULARY = 32, 2, 2048


class Tokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config): ...

    def __init__(self, config: Config, *, dp_rank: int, **more) -> None:
        self.rank, self.step = dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(SEQUENCE).repeat(BATCH, 1)
        while True:
            generator = torch.Generator().manual_seed(1000 * self.step + self.rank)
            size = (BATCH, SEQUENCE + 1)
            tokens = torch.randint(0, VOCABULARY, size, generator=generator)
            self.step += 1
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config): ...

    def __init__(self, config: Config, **more) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, tokens: list[int]) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Metrics(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config): ...

    def log(self, step: int, loss: float, largest: float, norm: float, **more) -> None:
        say("step", step, "loss", float(loss), "norm", float(norm))


def main(folder: str, steps: str = "4") -> None:
    config = llama3_debugmodel()
    spec = config.model_spec
    spec.model.layers = spec.model.layers[:3]
    spec.state_dict_adapter = None
    for _, _, layer, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(layer, name, ScaledDotProductAttention.Config())  # also on CPUs
    config.dataloader = Tokens.Config()
    config.tokenizer = NoTokenizer.Config()
    config.metrics = Metrics.Config(log_freq=1)
    config.dump_folder = folder
    config.training.seq_len, config.training.local_batch_size = SEQUENCE, BATCH
    config.training.steps = int(steps)
    config.lr_scheduler.warmup_steps = 0
    config.optimizer.implementation = "for-loop"
    config.checkpoint.enable = True
    config.checkpoint.interval = 2
    config.checkpoint.last_save_model_only = False
    config.validator.enable = False
    config.debug.seed = 1
    trainer = config.build()
    trainer.train()
    (model,) = trainer.model_parts
    say("parameters", digest(model.parameters()))
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
