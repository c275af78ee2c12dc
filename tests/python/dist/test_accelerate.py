"""accelerate's FSDP2 plugin drives lowtide as it drives FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from support import accelerate_on_cpus
from support.ranks import RankPool
from support.recorder import Record, Recorder, assert_same_records
from support.systems import get_system

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
def accelerator_with(**settings: Any) -> Iterator[Any]:
    """One with the plugin, in a process as torchrun starts it."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerate_on_cpus.accept_cpus()
    accelerate_on_cpus.as_torchrun(dist.get_rank(), dist.get_world_size())
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy=settings.pop("policy", "transformer_based_wrap"),
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=settings.pop("efficient", False),
        cpu_offload=settings.pop("offload", False),
        state_dict_type="SHARDED_STATE_DICT",
    )
    try:
        yield Accelerator(
            cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2, **settings
        )
    finally:
        accelerate_on_cpus.forget()


def train(
    system: str, how: str, settings: dict[str, Any], directory: Path
) -> tuple[Record, list[bool]]:
    """Two epochs, a checkpoint after the first that is loaded in the end."""
    import lowtide
    from lowtide.integrations.accelerate import use_lowtide

    record = Recorder()
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2 * BATCHES * dist.get_world_size(), 6, generator=generator)
    torch.manual_seed(0)
    settings = dict(settings)
    states = settings.pop("states", None)
    model: Any = Net().to(settings.pop("built_in", torch.float32))
    if how == "before prepare":
        fully_shard = get_system(system).fully_shard
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    with accelerator_with(**settings) as accelerator:
        if how == "in prepare" and system == "lowtide":
            use_lowtide(accelerator)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        if states is not None and system == "lowtide":
            lowtide.step_on_device(optimizer.optimizer, states=states)
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
    units = [model, *model.blocks]
    return record.values, [isinstance(unit, lowtide.FSDPModule) for unit in units]


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n}ranks")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Of its own: accelerate changes environment variables."""
    with RankPool(request.param) as ranks:
        yield ranks


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "use_lowtide": ("in prepare", {}),
    "use_lowtide, loaded from rank 0": ("in prepare", {"efficient": True}),
    "sharded before prepare": ("before prepare", {"policy": "no_wrap"}),
    "use_lowtide, on the host": (
        "in prepare",
        {"offload": CPUOffloadPolicy(pin_memory=False)},
    ),
    "use_lowtide, on the host, stepped on the device": (
        "in prepare",
        {"offload": CPUOffloadPolicy(pin_memory=False), "states": "host"},
    ),
    "use_lowtide, parameters alone on the host": (
        "in prepare",
        {"offload": CPUOffloadPolicy(pin_memory=False), "states": "device"},
    ),
    "use_lowtide, bf16": ("in prepare", {"mixed_precision": "bf16"}),
    # Which accelerate makes fp32 before it shards.
    "use_lowtide, built in bf16": (
        "in prepare",
        {"mixed_precision": "bf16", "built_in": torch.bfloat16},
    ),
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


def use_without_plugin() -> None:
    from accelerate import Accelerator

    from lowtide.integrations.accelerate import use_lowtide

    accelerate_on_cpus.as_torchrun(dist.get_rank(), dist.get_world_size())
    try:
        use_lowtide(Accelerator(cpu=True))
    finally:
        accelerate_on_cpus.forget()


def test_an_accelerator_without_fsdp2_is_refused() -> None:
    with RankPool(2) as ranks:  # where accelerate has noted no plugin
        outcomes = ranks.outcomes(use_without_plugin, timeout=60)
    for outcome in outcomes:
        assert outcome.error.startswith(
            "lowtide: integrations.accelerate: expected an accelerator with the FSDP "
            "plugin, version 2, got none (DistributedType.MULTI_CPU). Pass fsdp_plugin="
        )
