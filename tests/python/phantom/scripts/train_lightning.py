"""Lightning's own demonstration transformer (pytorch_lightning.demos.transformer), fit
by its Trainer: ``train_lightning.py [STRATEGY]``, ddp by default, fsdp for Lightning's
FSDP, model_parallel for FSDP2 in ``configure_model``.
"""

import os
import sys

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.demos import Transformer
from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

strategy = (sys.argv[1:] or ["ddp"])[0]


class LanguageModel(pl.LightningModule):
    def __init__(self, vocabulary: int = 8192) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.model = Transformer(vocabulary, nlayers=4, nhid=1024, ninp=256)

    def configure_model(self) -> None:
        if strategy == "model_parallel":
            mesh = self.device_mesh["data_parallel"]
            for layers in (
                self.model.transformer.encoder,
                self.model.transformer.decoder,
            ):
                for layer in layers.layers:
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = F.nll_loss(self.model(inputs, targets), targets.view(-1))
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        inputs, targets = batch
        loss = F.nll_loss(self.model(inputs, targets), targets.view(-1))
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


world = int(os.environ.get("WORLD_SIZE", 1))
tokens = torch.randint(0, 8192, (16 * world, 65))
loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4)
strategies = {
    "fsdp": lambda: FSDPStrategy(
        auto_wrap_policy={
            torch.nn.TransformerEncoderLayer,
            torch.nn.TransformerDecoderLayer,
        }
    ),
    "model_parallel": lambda: ModelParallelStrategy(
        data_parallel_size=world, tensor_parallel_size=1
    ),
}
trainer = pl.Trainer(
    accelerator="gpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    num_nodes=max(1, world // 8),
    strategy=strategies.get(strategy, lambda: strategy)(),
    precision="bf16-true" if strategy == "model_parallel" else "bf16-mixed",
    max_steps=4,
    val_check_interval=2,
    limit_val_batches=1,
    gradient_clip_val=None if strategy == "fsdp" else 1.0,
    log_every_n_steps=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(LanguageModel(), loader, loader)
print("steps", trainer.global_step)
