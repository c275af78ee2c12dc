"""accelerate's FSDP2 plugin:
``torchrun ... [-m lowtide run] with_accelerate.py FOLDER``

Two epochs with accumulation, clipping and bf16; a checkpoint in FOLDER after the
first, from which another model goes on.
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from bits import digest, say
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make(accelerator: Accelerator, seed: int) -> tuple:
    set_seed(seed)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(128, 32),
        nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
        nn.Linear(32, 128),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator.prepare(model, optimizer)


def train(accelerator: Accelerator, model, optimizer, loader) -> None:
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
                )
            accelerator.backward(loss)
            norm = 0.0
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                norm = float(getattr(norm, "full_tensor", lambda norm=norm: norm)())
            optimizer.step()
            optimizer.zero_grad()
        say("loss", loss.item(), "norm", norm)


def main(folder: str) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
        reshard_after_forward=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        fsdp_plugin=plugin,
    )
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randint(0, 128, (32, 17), generator=generator))
    loader = accelerator.prepare(DataLoader(data, batch_size=4))
    model, optimizer = make(accelerator, seed=0)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(folder)
    accelerator.free_memory(model, optimizer)
    model, optimizer = make(accelerator, seed=1)
    accelerator.load_state(folder)
    train(accelerator, model, optimizer, loader)
    say("parameters", digest(model.parameters()))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
