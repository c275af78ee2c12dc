"""What a script asks of ``torch.cuda`` and its tensors, answered by the phantom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.planning import plan_request
from lowtide.planning.request import Request, Script

SCRIPT = """
import json, os, threading, torch
from torch import nn

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)

def from_thread():
    devices = []
    def load():
        devices.append(torch.ones(2).cuda(non_blocking=True))
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    return devices[0]

def saved(map_location):
    torch.save(torch.ones(3, device="cuda"), "x.pt")
    return torch.load("x.pt", map_location=map_location)

def default_device():
    torch.set_default_device("cuda")
    x = torch.ones(2)
    torch.set_default_device(None)
    return x

def generated(**device):
    generator = torch.Generator(**device)
    generator.manual_seed(0)
    return torch.randn(2, generator=generator, device="cuda")

def in_autocast():
    with torch.autocast("cuda", torch.bfloat16):
        return torch.is_autocast_enabled(), str(torch.get_autocast_gpu_dtype())

with open("found.json", "w") as file:
    json.dump(eval({expression!r}), file)

model = nn.Linear(16, 16).to(rank)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.ones(4, 16, device=rank)).sum().backward()
    optimizer.step()
"""


def found(folder: Path, monkeypatch: pytest.MonkeyPatch, expression: str) -> Any:
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(SCRIPT.replace("{expression!r}", repr(expression)))
    plan_request(Request(Script("train.py"), world=8, rank=3))
    return json.loads((folder / "found.json").read_text())


ON_THE_DEVICE = [
    "torch.ones(2).to(rank)",
    "torch.ones(2, device=rank)",
    "torch.ones(2, device=f'cuda:{rank}')",
    "torch.ones(2).to(torch.device('cuda', rank))",
    "torch.ones(2).to(device=rank, dtype=torch.bfloat16)",
    "torch.zeros_like(torch.ones(2), device=rank)",
    "nn.Linear(2, 2).to(rank).weight",
    "nn.Linear(2, 2).cuda(rank).weight",
    "from_thread()",
    "default_device()",
    "generated(device='cuda')",
    "generated(device=rank)",
    "generated(device=torch.device('cuda', rank))",
    "saved(None)",
    "saved('cuda')",
    "saved(f'cuda:{rank}')",
    "saved(torch.device('cuda'))",
    "saved({'cuda:0': f'cuda:{rank}'})",
    "torch.serialization.default_restore_location(torch.UntypedStorage(4), 'cuda:0')",
]


def test_every_way_to_name_a_device(tmp_path, monkeypatch):
    expression = ", ".join(f"str(({e}).device)" for e in ON_THE_DEVICE)
    assert found(tmp_path, monkeypatch, f"[{expression}]") == (
        ["phantom:0"] * len(ON_THE_DEVICE)
    )


ANSWERS = {
    "torch.ones(2, device='cuda').is_cuda": True,
    "torch.ones(2).is_cuda": False,
    "nn.Linear(2, 2).cuda().weight.is_cuda": True,
    "isinstance(torch.Generator(), torch.Generator)": True,
    "torch.cuda.device_count()": 8,
    "torch.is_autocast_enabled()": False,
    "in_autocast()": [True, "torch.bfloat16"],
    "torch.cuda.memory.memory_stats()['allocated_bytes.all.current']": 0,
    "torch.cuda.memory.max_memory_reserved()": 2 << 20,
    "torch.cuda.memory.empty_cache()": None,
    "torch.cuda.memory._record_memory_history(max_entries=9)": None,
    "torch.cuda.reset_max_memory_allocated()": None,
    "len(torch.cuda.memory_summary()) > 99": True,
    "torch.compile(nn.Linear(2, 2))._orig_mod.weight.shape[0]": 2,
}


def test_what_programs_ask(tmp_path, monkeypatch):
    expression = "{" + ", ".join(f"{e!r}: {e}" for e in ANSWERS) + "}"
    assert found(tmp_path, monkeypatch, expression) == ANSWERS
