"""A character model on one GPU with autocast and a GradScaler."""

import argparse
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.benchmark = True


class Windows(Dataset):
    def __init__(self, text: bytes, block: int) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.block = block

    def __len__(self) -> int:
        return len(self.data) - self.block - 1

    def __getitem__(self, i: int):
        window = self.data[i : i + self.block + 1]
        return window[:-1], window[1:]


class GPT(nn.Module):
    def __init__(self, dim: int, layers: int, block: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.position = nn.Parameter(torch.zeros(1, block, dim))
        layer = nn.TransformerEncoderLayer(
            dim, 4, 4 * dim, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 256)

    def forward(self, idx, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(
            idx.size(1), device=idx.device
        )
        x = self.embed(idx) + self.position[:, : idx.size(1)]
        logits = self.head(self.blocks(x, mask=mask, is_causal=True))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, 256), targets.view(-1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    if not torch.cuda.is_available():
        raise SystemExit("this script needs a GPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1337)
    torch.cuda.manual_seed_all(1337)
    print("training on", torch.cuda.get_device_name(0))

    data = Windows(b"to be or not to be, that is the question. " * 100, 64)
    loader = DataLoader(data, batch_size=32, shuffle=True, pin_memory=True)
    model = GPT(args.dim, args.layers, block=64).to(device)
    model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    scaler = torch.cuda.amp.GradScaler()

    for epoch in range(args.epochs):
        start = time.time()
        for step, (x, y) in enumerate(loader):
            x, y = x.to(device, non_blocking=True), y.cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                _, loss = model(x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if step % 10 == 0:
                torch.cuda.synchronize()
                print(
                    f"epoch {epoch} step {step} loss {loss.item():.3f} "
                    f"perplexity {math.exp(loss.item()):.1f} "
                    f"memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB "
                    f"time {time.time() - start:.1f}s"
                )
                torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
