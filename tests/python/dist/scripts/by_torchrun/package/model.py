import torch
from torch import nn


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(32, 16),
        *[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)],
        nn.Linear(16, 32),
    )
