"""Steps in CUDA graphs: ``train_graphed.py callables``, those that
torch.cuda.make_graphed_callables makes, as torch's page on CUDA semantics has it; or
``compiled``, those of torch.compile's reduce-overhead mode, with a compiled optimizer.
"""

import sys

import torch
from torch import nn

BATCH, WIDTH = 256, 1024
loss_of = nn.MSELoss()


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.ReLU()).cuda()


def callables() -> None:
    first, second, third = layers(), layers(), layers()
    modules = nn.ModuleList([first, second, third])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)
    sample = torch.randn(BATCH, WIDTH, device="cuda")
    hidden = torch.randn(BATCH, WIDTH, device="cuda", requires_grad=True)
    first = torch.cuda.make_graphed_callables(first, (sample,))
    second, third = torch.cuda.make_graphed_callables(
        (second, third), ((hidden,), (hidden,))
    )
    for _ in range(3):
        x = torch.randn(BATCH, WIDTH, device="cuda")
        y = first(x)
        y = second(y) if y.sum().item() > 0 else third(y)
        loss_of(y, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def compiled() -> None:
    model = torch.compile(nn.Sequential(layers(), layers()), mode="reduce-overhead")
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), rate, capturable=True)
    step = torch.compile(optimizer.step)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(BATCH, WIDTH, device="cuda")
        loss_of(model(x), x).backward()
        step()
        optimizer.zero_grad()


{"callables": callables, "compiled": compiled}[sys.argv[1]]()
