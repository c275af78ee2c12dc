"""A snapshot of a sharded model on a device, as a save in the background takes it."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import lowtide
from lowtide.saving import background

dist.init_process_group()
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
for layer in model:
    lowtide.fully_shard(layer)
lowtide.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())


def step() -> None:
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


step()
waits = []
wait_event = torch.cuda.Stream.wait_event
torch.cuda.Stream.wait_event = lambda *args: waits.append(args) or wait_event(*args)
device = torch.device("cuda", torch.cuda.current_device())
state = {"model": model.state_dict(), "gradients": {}}
snapshot = background.Snapshot(state, device)
copies = [t.to_local() for t in snapshot.state["model"].values()]
assert all(isinstance(t, DTensor) for t in snapshot.state["model"].values())
assert all(t.device.type == "cpu" and t.is_pinned() for t in copies)
model(torch.randn(8, 64, device="cuda")).sum().backward()
assert all(args[1] is not snapshot._events[0] for args in waits)  # no forward waits
optimizer.step()
assert waits[-1][1] is snapshot._events[0]
assert waits[-1][0] == torch.cuda.current_stream()
behind = len(waits)
optimizer.step()
assert len(waits) == behind, "the first step alone"
snapshot.wait()
optimizer.zero_grad()

saving = lowtide.save(sys.argv[1], model, optimizer, in_background=True)
step()
assert saving is not None
saving.wait()
assert not Path(sys.argv[1]).exists(), "nobody has computed these values"
print("done")
dist.destroy_process_group()
