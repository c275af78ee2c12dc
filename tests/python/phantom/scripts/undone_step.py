"""A step on a device that is undone, and one that finds no memory and runs again."""

import re

import torch
import torch.distributed as dist

import lowtide

MIB = 1 << 20

dist.init_process_group()
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)])
for layer in model:
    lowtide.fully_shard(layer)
lowtide.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
waits = []
wait_event = torch.cuda.Stream.wait_event
torch.cuda.Stream.wait_event = lambda *args: waits.append(args) or wait_event(*args)


def whole_step() -> None:
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


block = lowtide.step(model, optimizer)
for _ in range(2):
    whole_step()
# What a step remembers is not on the device.
allocated = torch.cuda.memory_allocated()
with block:
    assert torch.cuda.memory_allocated() == allocated
    copies = block._remembered._copies
    stepped = copies.state["optimizer"]
    assert any(copy.is_pinned() for copy in stepped)
    copied = copies._events[0]
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    assert all(args[1] is not copied for args in waits)  # no forward waits
    optimizer.step()
    assert any(args[1] is copied for args in waits)
    optimizer.zero_grad()
del copies, stepped
assert block.happened

try:
    with block:
        whole_step()
        raise ValueError("late")
except ValueError:
    pass
assert not block.happened and torch.cuda.memory_allocated() == allocated

tries: list[int] = []
reserved: list[int] = []


def without_memory() -> None:
    reserved.append(torch.cuda.memory_reserved())
    kept = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")]
    tries.append(len(kept))
    if len(tries) == 1:
        kept.append(torch.empty(1 << 40, dtype=torch.uint8, device="cuda"))
    whole_step()


block.run(without_memory)
assert len(tries) == 2, tries
assert reserved[1] <= reserved[0], reserved  # its 64 MiB were given back

try:
    with block:
        held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    text = str(error)
assert "CUDA out of memory. Tried to allocate 1024.00 GiB" in text, text
found = re.search(r"([\d.]+) MiB activations and what else the program holds", text)
assert found is not None and float(found[1]) >= 64, text
assert "reserved by torch and not in use" in text, text
print("done")
dist.destroy_process_group()
