"""A training loop with accelerate and nothing else of Hugging Face's, as its
documentation's migration page has it: prepare, accumulate, autocast, clip, gather.

``train_accelerate.py [fsdp2]``: DDP under torchrun, or accelerate's FSDP2.
"""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

plugin = None
if "fsdp2" in sys.argv[1:]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
        activation_checkpointing=True,
        reshard_after_forward=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
accelerator = Accelerator(
    mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=plugin
)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


world = accelerator.num_processes
data = TensorDataset(
    torch.randint(0, 8192, (48 * world, 128)), torch.randint(0, 16, (48 * world,))
)
loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
model, optimizer, loader, schedule = accelerator.prepare(
    model, optimizer, loader, schedule
)
model.train()
total = torch.zeros((), device=accelerator.device)
for tokens, labels in loader:
    with accelerator.accumulate(model):
        with accelerator.autocast():
            loss = F.cross_entropy(model(tokens), labels)
        total += loss.detach()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

model.eval()
correct = 0
with torch.no_grad():
    for tokens, labels in loader:
        guesses = model(tokens).argmax(-1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        correct += (guesses == labels).sum().item()
accelerator.print(f"loss {total.item() / len(loader):.2f}, {correct} right")
accelerator.end_training()
