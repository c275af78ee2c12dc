"""The process that a plan runs in: what it may start, and when it ends."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.planning import plan_request
from lowtide.planning.request import Request, Script

LOADS_WITH_WORKERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def batch(rows):
    return torch.stack([row for row, in rows])

model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(64, 16))
for x in DataLoader(data, batch_size=8, num_workers=2, collate_fn=batch):
    model(x.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# Says that it runs by holding a lock, which the system releases.
WAITS = """
import fcntl, time
held = open("lock", "w")
fcntl.flock(held, fcntl.LOCK_EX)
open("began", "w").close()
while True:
    time.sleep(0.1)
"""


def test_data_loaders_have_workers(tmp_path):
    (tmp_path / "train.py").write_text(LOADS_WITH_WORKERS)
    plan = plan_request(Request(Script(str(tmp_path / "train.py"))))
    assert plan.steps == 3
    assert plan.notes == []


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_ends_with_the_command(tmp_path, signal_number):
    (tmp_path / "train.py").write_text(WAITS)
    command = [sys.executable, "-m", "lowtide", "plan", "--", "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as started:
        assert comes_true((tmp_path / "began").exists)
        assert not is_released(tmp_path / "lock")
        started.send_signal(signal_number)
    assert comes_true(lambda: is_released(tmp_path / "lock"))


def comes_true(condition) -> bool:
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.1)
    return False


def is_released(path: Path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
