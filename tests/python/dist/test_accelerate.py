"""accelerate's FSDP2 plugin drives lowtide as it drives FSDP2.

accelerate chooses the plugin only where there is an accelerator: `as_on_a_gpu` tells
it so, on gloo; what runs then is its own code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.ranks import RankPool
from support.recorder import Record, Recorder, assert_same_records

BATCHES = 4
EPOCHS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@contextmanager
def as_on_a_gpu(**settings: Any) -> Iterator[Any]:
    """An Accelerator with the plugin, in a process as torchrun starts it."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    os.environ.update(LOCAL_WORLD_SIZE=size, MASTER_ADDR="localhost", MASTER_PORT="0")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy=settings.pop("policy", "transformer_based_wrap"),
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=settings.pop("efficient", False),
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2, **settings
    )
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    try:
        yield accelerator
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def train(
    system: str, how: str, settings: dict[str, Any], directory: Path
) -> tuple[Record, list[bool]]:
    """Two epochs, a checkpoint after the first that is loaded in the end."""
    import torch.distributed.fsdp as fsdp

    import lowtide

    theirs, record = fsdp.fully_shard, Recorder()
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2 * BATCHES * dist.get_world_size(), 6, generator=generator)
    torch.manual_seed(0)
    model: Any = Net()
    chosen = lowtide.fully_shard if system == "lowtide" else theirs
    if how == "before prepare":
        for block in model.blocks:
            chosen(block)
        chosen(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    fsdp.fully_shard = chosen
    try:
        with as_on_a_gpu(**settings) as accelerator:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for epoch in range(EPOCHS):
                for x in loader:
                    with accelerator.accumulate(model):
                        loss = (model(x).float() - x[:, :5]).pow(2).mean()
                        record.add("loss", loss)
                        accelerator.backward(loss)
                        record.add_model(model)
                        if accelerator.sync_gradients:
                            parameters = model.parameters()
                            norm = accelerator.clip_grad_norm_(parameters, 0.5)
                            record.add("norm", norm)
                        optimizer.step()
                        optimizer.zero_grad()
                if epoch == 0:
                    accelerator.save_state(directory)
            for name, value in accelerator.get_state_dict(model).items():
                record.add(f"full {name}", value)
            accelerator.load_state(directory)
            record.add_model(model)
            record.add("loaded", model(rows[:2]))
    finally:
        fsdp.fully_shard = theirs
    units = [model, *model.blocks]
    return record.values, [isinstance(unit, lowtide.FSDPModule) for unit in units]


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n}ranks")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Of its own: accelerate changes environment variables."""
    with RankPool(request.param) as ranks:
        yield ranks


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fully_shard replaced": ("in prepare", {}),
    "replaced, loaded from rank 0": ("in prepare", {"efficient": True}),
    "sharded before prepare": ("before prepare", {"policy": "no_wrap"}),
    "replaced, bf16": ("in prepare", {"mixed_precision": "bf16"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plugin_trains_and_checkpoints_bit_equal_to_fsdp2(
    pool: RankPool, tmp_path: Path, case: str
) -> None:
    theirs = pool.run(train, "fsdp2", *CASES[case], tmp_path / "fsdp2")
    ours = pool.run(train, "lowtide", *CASES[case], tmp_path / "lowtide")
    for (mine, own), (other, foreign) in zip(ours, theirs, strict=True):
        assert own == [True] * 4 and foreign == [False] * 4
        names = [name for name, _ in mine]
        assert names.count("loss") == EPOCHS * BATCHES
        assert names.count("norm") == EPOCHS * BATCHES // 2
        assert_same_records(mine, other)
    assert sum(name.startswith("full ") for name, _ in ours[0][0]) == 8
