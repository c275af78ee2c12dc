"""LOWTIDE_DEBUG=1 and LOWTIDE_DEBUG_LOG: docs/debugging.md."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from support.ranks import RankPool

WIDTH = 16
DEBUG = {"LOWTIDE_DEBUG": "1"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = lowtide.tag(torch.tanh(self.up(x)), "hidden")
        return x + self.down(torch.tanh(self.hidden))


def make(*, save: bool = True) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    policy = lowtide.ActivationPolicy(save=["hidden"] if save else [])
    for block in model:
        lowtide.fully_shard(lowtide.checkpoint(block, policy))
    lowtide.fully_shard(model)
    return model


def data(step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def train(change: str = "") -> list[torch.Tensor]:
    """``change``: a parameter that the last rank changes before the second step."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        if change and step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                model.get_parameter(change).to_local().mul_(2)
        model(data(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local().clone() for p in model.parameters()]


def test_bits_are_the_same_when_debugging(pool_of) -> None:
    with RankPool(2, env=DEBUG) as pool:
        found = pool.run(train)
    for ours, expected in zip(found, pool_of(2).run(train), strict=True):
        assert all(map(torch.equal, ours, expected))


def freed_bytes() -> set[int]:
    """What a kernel that kept the address of a gathered weight reads behind its unit's
    forward, but for what the allocator itself writes in front."""
    model = make()
    found = []
    up = model[1].up

    def keep_address(*_: Any) -> None:
        found.append(up.weight.data_ptr())

    def read(*_: Any) -> None:
        found.append(ctypes.string_at(found[0], up.weight.nbytes)[64:])

    up.register_forward_pre_hook(keep_address)
    model[1].register_forward_hook(read)  # behind lowtide's
    with torch.no_grad():
        model(data())
    return set(found[1])


def test_freed_parameters_are_nan_to_whoever_has_their_address() -> None:
    with RankPool(2, env=DEBUG) as pool:
        assert pool.run(freed_bytes) == [{0xFF}] * 2


# -- what a region stores -------------------------------------------------------------


def write_unseen(what: str) -> str:
    """What the backward raises."""
    model = make(save=what == "saved")
    x = data().requires_grad_() * 1.0
    out = model(x)
    written = model[1].hidden if what == "saved" else x
    written.data.mul_(2)  # no version counter moves
    with contextlib.suppress(StopIteration):
        try:
            out.sum().backward()
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "named"), [("argument", "argument 0"), ("saved", "'hidden', value 0")]
)
def test_a_write_through_data_to_what_is_stored_raises(pool_of, what, named) -> None:
    with RankPool(2, env=DEBUG) as pool:
        for said in pool.run(write_unseen, what):
            assert said.startswith(
                f"lowtide: checkpoint(Block): expected {named} as its forward had it, "
                "got other bits ("
            )
            assert said.endswith("Write to a clone().")
    assert pool_of(2).run(write_unseen, what) == ["no error"] * 2


# -- the replay log -------------------------------------------------------------------


def logged(folder: Path, change: str = "") -> list[list[str]]:
    with RankPool(2, env={"LOWTIDE_DEBUG_LOG": str(folder)}) as pool:
        pool.run(train, change)
    return [(folder / f"rank-{r}.txt").read_text().splitlines() for r in range(2)]


def test_equal_runs_have_equal_logs_and_others_part_where_they_do(tmp_path) -> None:
    first, again = logged(tmp_path / "first"), logged(tmp_path / "again")
    assert first == again
    changed = logged(tmp_path / "changed", "1.down.bias")
    assert changed != first
    for rank, (one, other) in enumerate(zip(first, changed, strict=True)):
        pairs = enumerate(zip(one, other, strict=True))
        place = next(i for i, (a, b) in pairs if a != b)
        # In the forward of the second step, of the unit that was changed: all ranks
        # have its gathered parameters.
        assert one[place].startswith("forward of 1 with gradients: "), (
            rank,
            one[place],
        )
        arguments = [line.split(" -> ")[0] for line in (one[place], other[place])]
        assert arguments[0] == arguments[1]
        assert sum(line.startswith("step ") for line in one[:place]) == 1


def test_a_log_says_what_happened_and_nothing_that_changes_by_itself(tmp_path) -> None:
    for lines in logged(tmp_path):
        kinds = {re.split(r"[:\d]", line)[0].strip() for line in lines}
        assert kinds >= {"unit", "forward of", "backward of", "step", "gradient of"}
        assert "parameter" in kinds
        (calls, *_) = [line for line in lines if line.startswith("calls until now,")]
        assert re.fullmatch(
            r"calls until now, gather: all-gather \d+ times, \d+ bytes", calls
        )
        of_a_unit = [line for line in lines if line.startswith("calls until now of 1:")]
        assert [
            re.sub(r", (settings|trainable) \d+", "", line) for line in of_a_unit
        ] == [
            f"calls until now of 1: backward {n}, gather {2 * n}, reduce {n}"
            for n in (1, 2, 3)
        ]
        assert not any("no forward" in line for line in lines)
        assert not any("0x" in line or "tensor(" in line for line in lines)


def train_compiled() -> list[torch.Tensor]:
    model = make()
    model[0].compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(data(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local().clone() for p in model.parameters()]


def test_compiled_blocks_train_as_before_and_are_in_the_log(pool_of, tmp_path) -> None:
    with RankPool(2, env=DEBUG | {"LOWTIDE_DEBUG_LOG": str(tmp_path)}) as pool:
        found = pool.run(train_compiled)
    for ours, expected in zip(found, pool_of(2).run(train_compiled), strict=True):
        assert all(map(torch.equal, ours, expected))
    lines = (tmp_path / "rank-0.txt").read_text().splitlines()
    assert sum(line.startswith("forward of 0 ") for line in lines) >= 2  # steps
    assert not any(line.startswith("no forward of") for line in lines)


def step_without_a_unit() -> None:
    model = make()
    model(data()).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    model[0](data()).sum().backward()
    optimizer.step()


def test_the_log_says_which_unit_did_not_run(tmp_path) -> None:
    with RankPool(2, env={"LOWTIDE_DEBUG_LOG": str(tmp_path)}) as pool:
        pool.run(step_without_a_unit)
    lines = (tmp_path / "rank-0.txt").read_text().splitlines()
    missing = [line for line in lines if line.startswith("no forward of")]
    assert missing == [
        f"no forward of {name} was seen: none, or compiled"
        for name in ("Sequential", "1")
    ]


# -- sequence parallelism -------------------------------------------------------------


def write_to_a_shard_unseen() -> str:
    """What the backward raises of a shard that is gathered again in it."""
    group = dist.group.WORLD
    assert group is not None
    layer = lowtide.sequence_parallel.ColumnParallelLinear(
        WIDTH, WIDTH, group=group, name="in"
    )
    x = data().requires_grad_() * 1.0
    with lowtide.sequence_parallel.gather_policy(regather=["in"], min_bytes=0):
        out = layer(x)
    x.data.mul_(2)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_shard_that_is_gathered_again_has_the_bits_of_its_forward(pool_of) -> None:
    with RankPool(2, env=DEBUG) as pool:
        for said in pool.run(write_to_a_shard_unseen):
            assert said.startswith(
                "lowtide: sequence-parallel gather 'in': expected the shard's bits as "
                "they were gathered, got others, which no version counter told: "
            )
    assert pool_of(2).run(write_to_a_shard_unseen) == ["no error"] * 2


def refused() -> str:
    with pytest.raises(ValueError, match="LOWTIDE_DEBUG") as raised:
        make()
    return str(raised.value)


def test_another_value_is_refused() -> None:
    with RankPool(1, env={"LOWTIDE_DEBUG": "yes"}) as pool:
        assert pool.run(refused) == [
            "lowtide: LOWTIDE_DEBUG: expected 0 or 1, got 'yes'. Unset it for 0."
        ]


def shown() -> tuple[set[str], int]:
    """The ranges of a step in a profile, and how much torch's `fsdp` log has of it."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    loggers = [
        logging.getLogger("torch.distributed.fsdp"),  # TORCH_LOGS=fsdp
        logging.getLogger("torch.distributed._composable.fsdp"),
    ]
    model = make()
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    with torch.profiler.profile() as profile:
        model(data().requires_grad_()).square().sum().backward()
    for logger in loggers:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    names = {event.name for event in profile.events()}
    return {name for name in names if name.startswith("lowtide::")}, len(records)


def test_a_profile_shows_the_units_and_torchs_log_does_not(pool_of) -> None:
    text = (Path(__file__).parents[3] / "docs/debugging.md").read_text()
    (sentence,) = re.findall(r"A profile of torch's shows.*", text, re.DOTALL)
    said = set(re.findall(r"`lowtide::(\w+)", sentence))
    for ranges, logged_events in pool_of(2).run(shown):
        for block in ("0", "1"):
            assert {f"lowtide::{name} ({block})" for name in said} <= ranges
        assert len(said) == 6 and logged_events == 0
