"""Lightning's ModelParallelStrategy:
``torchrun ... [-m lowtide run] with_lightning.py FOLDER``

Four steps, a checkpoint in FOLDER, and four more of another module that resumes.
"""

import os
import sys

import pytorch_lightning as pl
import torch
from bits import digest, say
from pytorch_lightning.demos import Transformer
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader, TensorDataset


class LanguageModel(pl.LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Transformer(64, nlayers=2, nhid=64, ninp=32, dropout=0.0)

    def configure_model(self) -> None:
        transformer = self.model.transformer
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
        settings = {"mesh": self.device_mesh["data_parallel"], "mp_policy": policy}
        for layer in (*transformer.encoder.layers, *transformer.decoder.layers):
            fully_shard(layer, **settings)
        fully_shard(self.model, mesh=settings["mesh"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nll_loss(self.model(inputs, targets), targets.view(-1))
        say("loss", loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: str) -> None:
    world = int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (8 * 2 * world, 17), generator=generator)
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2)
    saved = f"{folder}/checkpoint"
    for steps, resumed in ((4, None), (8, saved)):
        trainer = pl.Trainer(
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy=ModelParallelStrategy(world, 1),
            max_steps=steps,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = LanguageModel(seed=steps)
        trainer.fit(module, loader, ckpt_path=resumed)
        if resumed is None:
            trainer.save_checkpoint(saved)
    say("parameters", digest(module.parameters()))


if __name__ == "__main__":
    main(sys.argv[1])
