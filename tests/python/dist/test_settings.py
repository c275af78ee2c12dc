"""Every setting of FSDP2 beside FSDP2: the same bits with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from lowtide._torch_version import VERSION
from support.model import ModelConfig, batch, build, loss_fn
from support.recorder import (
    Record,
    Recorder,
    assert_same_records,
    assert_trains_as_fsdp2,
    finish_step,
)
from support.systems import System, get_system
from support.training import adamw, local

# Dim 1 of every matrix is a multiple of four.
CONFIG = ModelConfig(
    dim=16, num_heads=2, num_kv_heads=2, kv_dim=8, ffn=24, vocab=37, num_layers=2
)
# The feed-forward matrices are too large for the packed row, the others are not.
WIDE = replace(CONFIG, ffn=2304)
NUM_STEPS = 3


@dataclass
class Setting:
    """`wrap`: keywords of fully_shard; `change`: called on every unit afterwards."""

    wrap: Callable[[Any], dict[str, Any]] = lambda model: {}
    change: Callable[[System, Any], None] = lambda system, unit: None
    before: Callable[[Any, bool], None] = lambda model, last: None
    microbatches: int = 1
    config: ModelConfig = CONFIG


def llama(system: System, setting: Setting) -> Any:
    model: Any = build(setting.config)
    policy = system.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    keywords = {"mp_policy": policy} | setting.wrap(model)
    for layer in model.layers:
        system.fully_shard(layer, **keywords)
    system.fully_shard(model, **keywords)
    system.prepare(model)
    for unit in [*model.layers, model]:
        setting.change(system, unit)
    return model


def train(system_name: str, name: str) -> Record:
    setting = SETTINGS[name]
    model = llama(get_system(system_name), setting)
    optimizer = adamw(model, foreach=False)
    record = Recorder()
    for step in range(NUM_STEPS):
        for microbatch in range(setting.microbatches):
            setting.before(model, microbatch == setting.microbatches - 1)
            inputs, targets = batch(setting.config, step, microbatch, dist.get_rank())
            loss = loss_fn(model(inputs), targets)
            record.add("loss", loss)
            loss.backward()
            record.add_model(model)
        finish_step(model, optimizer, record)
    return record.values


# -- settings -----------------------------------------------------------------------


def columns(model: Any) -> dict[str, Any]:
    """Matrices along dim 1, norms along dim 0."""
    return {"shard_placement_fn": lambda p: Shard(-1) if p.ndim == 2 else None}


def some_columns(model: Any) -> dict[str, Any]:
    chosen = {model.layers[0].w1.weight, model.layers[1].wo.weight}
    return {"shard_placement_fn": lambda p: Shard(1) if p in chosen else Shard(0)}


def columns_in_a_smaller_group(model: Any) -> dict[str, Any]:
    return columns(model) | smaller_group(model)


def smaller_group(model: Any) -> dict[str, Any]:
    return {"reshard_after_forward": max(1, dist.get_world_size() // 2)}


def ignore_norms(model: Any) -> dict[str, Any]:
    norms = {p for p in model.parameters() if p.ndim == 1}
    return {"ignored_params": norms, "mp_policy": MixedPrecisionPolicy()}


def sum_of_gradients(system: System, unit: Any) -> None:
    unit.set_force_sum_reduction_for_comms(True)


def divided_by(factor: float) -> Callable[[System, Any], None]:
    def change(system: System, unit: Any) -> None:
        # Without it FSDP2 asks for an operation gloo does not have. On one rank
        # FSDP2 with it divides twice.
        unit.set_force_sum_reduction_for_comms(dist.get_world_size() > 1)
        unit.set_gradient_divide_factor(factor)

    return change


def divided_by_its_old_name(system: System, unit: Any) -> None:
    unit.set_force_sum_reduction_for_comms(dist.get_world_size() > 1)
    unit.set_reduce_scatter_divide_factor(5.0)


def three_input_buffers(system: System, unit: Any) -> None:
    """Of torch 2.13, and no matter of bits; as the next one."""
    if hasattr(unit, "set_reduce_scatter_max_input_buffers"):
        unit.set_reduce_scatter_max_input_buffers(3)


def reductions_of_their_own(system: System, unit: Any) -> None:
    if hasattr(unit, "set_separate_reduce_scatter_group"):
        unit.set_separate_reduce_scatter_group(True)


def halving_hook(system: System, unit: Any) -> None:
    unit.set_all_reduce_hook(lambda row: row.mul_(0.375))


def not_unsharded_in_backward(system: System, unit: Any) -> None:
    """Right only because the parameters stay from forward."""
    unit.set_reshard_after_forward(False, recurse=False)
    unit.set_unshard_in_backward(False)


def storage_stays(system: System, unit: Any) -> None:
    """Of torch 2.15, and no matter of bits."""
    if hasattr(unit, "set_keep_unsharded_storage"):
        unit.set_keep_unsharded_storage(True)


def buffers_of_the_group(system: System, unit: Any) -> None:
    if dist.get_world_size() < 3:
        unit.set_allocate_memory_from_process_group_for_comm(True)


def with_event(model: Any, last: bool) -> None:
    model.set_post_optim_event(torch.Event("cpu"))


def asynchronous_unshard(system: System, unit: Any) -> None:
    unit._set_unshard_async_op(True)


SETTINGS: dict[str, Setting] = {
    "shard_placement_columns": Setting(columns),
    "shard_placement_of_some": Setting(some_columns, microbatches=2),
    "shard_placement_without_sync": Setting(
        columns,
        before=lambda model, last: model.set_requires_gradient_sync(last),
        microbatches=3,
    ),
    "wide_columns": Setting(columns, microbatches=2, config=WIDE),
    "wide_columns_in_a_smaller_group": Setting(
        columns_in_a_smaller_group, microbatches=2, config=WIDE
    ),
    "wide_columns_that_stay": Setting(columns, change=storage_stays, config=WIDE),
    "reshard_to_smaller_group": Setting(smaller_group, microbatches=2),
    "ignored_params": Setting(ignore_norms),
    "force_sum": Setting(change=sum_of_gradients),
    "divide_factor": Setting(change=divided_by(3.0), microbatches=2),
    "reduce_scatter_divide_factor": Setting(
        change=divided_by_its_old_name, microbatches=2
    ),
    "reduce_scatter_max_input_buffers": Setting(
        change=three_input_buffers, microbatches=2
    ),
    "separate_reduce_scatter_group": Setting(
        change=reductions_of_their_own, microbatches=2
    ),
    "all_reduce_hook": Setting(change=halving_hook, microbatches=2),
    "unshard_in_backward": Setting(change=not_unsharded_in_backward),
    "buffers_of_the_group": Setting(change=buffers_of_the_group),
    "keep_unsharded_storage": Setting(
        smaller_group, change=storage_stays, microbatches=2
    ),
    "unshard_async_op": Setting(change=asynchronous_unshard),
    "post_optim_event": Setting(before=with_event, microbatches=2),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_setting_keeps_the_bits(pool_of, name, num_ranks):
    pool = pool_of(num_ranks)
    if (name, num_ranks) != ("wide_columns_in_a_smaller_group", 4):
        assert_trains_as_fsdp2(pool, train, name)
        return
    # FSDP2 raises: its smaller shards of columns are too short for their sizes.
    kept, whole = (pool.run(train, "lowtide", n) for n in (name, "wide_columns"))
    for mine, other in zip(kept, whole, strict=True):
        assert_same_records(mine, other)


# -- what a setting did -------------------------------------------------------------


def placements_and_wire(columns_sharded: bool) -> tuple[list[Any], tuple[int, int]]:
    from lowtide._sharding.unit import unit_state

    wrap = columns if columns_sharded else (lambda model: {})
    model = llama(get_system("lowtide"), Setting(wrap))
    facts = [
        (p.placements, tuple(p.to_local().shape), p.to_local().is_contiguous())
        for p in (model.layers[0].w1.weight, model.layers[0].attention_norm.weight)
    ]
    state = unit_state(model)
    assert state is not None
    state.groups.gather.reset_counters()
    inputs, targets = batch(CONFIG, 0, 0, dist.get_rank())
    loss_fn(model(inputs), targets).backward()
    assert model.layers[0].w1.weight.grad.placements == facts[0][0]
    return facts, state.groups.gather.counters["all-gather"]


def test_columns_are_sharded_at_the_same_wire_bytes(pool_of):
    for (facts, wire), (_, plain) in zip(
        pool_of(2).run(placements_and_wire, True),
        pool_of(2).run(placements_and_wire, False),
        strict=True,
    ):
        assert facts == [
            ((Shard(1),), (24, 8), True),
            ((Shard(0),), (8,), True),
        ]
        assert wire[0] > 0 and wire[0] == plain[0]
        assert abs(wire[1] - plain[1]) <= 0.03 * plain[1]


def train_two_dtypes(columns_sharded: bool) -> list[torch.Tensor]:
    """Losses, and whole parameters at the end. FSDP2 has one dtype a unit."""

    def wrap(model: Any) -> dict[str, Any]:
        model.layers[0].w1.bfloat16()
        model.layers[1].wo.bfloat16()
        return columns(model) if columns_sharded else {}

    model = llama(get_system("lowtide"), Setting(wrap, config=WIDE))
    optimizer = adamw(model, foreach=False)
    losses = []
    for step in range(NUM_STEPS):
        inputs, targets = batch(WIDE, step, 0, dist.get_rank())
        losses.append(loss_fn(model(inputs), targets))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses] + [
        p.detach().full_tensor() for p in model.parameters()
    ]


def test_columns_beside_ones_of_another_dtype_have_the_bits_of_rows(pool_of):
    by_rows = pool_of(2).run(train_two_dtypes, False)
    by_columns = pool_of(2).run(train_two_dtypes, True)
    for mine, other in zip(by_columns, by_rows, strict=True):
        assert all(map(torch.equal, mine, other))


def bytes_between_forward_and_backward(size: int) -> tuple[int, int, list[Any]]:
    """Live gathered bytes, those of one of ``size`` parts of every parameter (bf16,
    rows padded to 4 ranks, 256 B apart), the calls on the whole and the smaller group,
    and the number of units."""
    import lowtide
    from lowtide._sharding.unit import unit_state

    setting = Setting(lambda model: {"reshard_after_forward": size})
    model = llama(get_system("lowtide"), setting)
    inputs, targets = batch(CONFIG, 0, 0, dist.get_rank())
    for _ in range(2):
        loss = loss_fn(model(inputs), targets)
        live = lowtide.memory_report(model).categories["gathered"].live
        state = unit_state(model)
        assert state is not None
        state.groups.gather.reset_counters()
        loss.backward()
    group = unit_state(model.layers[0]).settings.post_forward_group  # type: ignore[union-attr]
    whole = [-(-len(p) // 4) * 4 * p[0].numel() * 2 for p in model.parameters()]
    return (
        live,
        sum(-(-n // size // 256) * 256 for n in whole),
        [
            state.groups.gather.counters["all-gather"][0],
            None if group is None else (group.size, group.counters["all-gather"][0]),
            len(model.layers) + 1,
        ],
    )


def test_smaller_group_keeps_its_part_and_gathers_from_neighbours(pool_of):
    whole = pool_of(4).run(bytes_between_forward_and_backward, 1)
    half = pool_of(4).run(bytes_between_forward_and_backward, 2)
    for (live, expected, calls), (part, expected_part, part_calls) in zip(
        whole, half, strict=True
    ):
        assert live == expected
        assert part == expected_part < live
        num_units = calls.pop()
        assert calls == [0, None]
        # Of two backwards, on one group that the units share.
        assert part_calls == [0, (2, 2 * num_units), num_units]


def places_of_full_parameters(keep: bool) -> list[Any]:
    """Whether what a forward read is there again in the next one, what it shows in
    between, and the bytes that are held there, after sleep at last."""
    import lowtide

    model: Any = llama(get_system("lowtide"), Setting())
    model.set_keep_unsharded_storage(keep)
    lowtide.memory_report(model, reset_peaks=True)
    read: list[torch.Tensor] = []
    linear = model.layers[0].w1  # within a unit
    linear.register_forward_hook(lambda *_: read.append(linear.weight.detach()))
    inputs, targets = batch(CONFIG, 0, 0, dist.get_rank())
    for _ in range(2):
        loss_fn(model(inputs), targets).backward()
    row = lowtide.memory_report(model).categories["gathered"]
    try:
        between: Any = read[0].float().abs().sum().item() > 0
    except RuntimeError as error:
        between = str(error).split(":")[0]
    one, two = read
    same = keep and one.data_ptr() == two.data_ptr()
    planned = lowtide.memory_report(model).to_dict()["categories"]["gathered"]
    lowtide.sleep(model)
    lowtide.wake(model)
    slept = lowtide.memory_report(model).categories["gathered"].live
    loss_fn(model(inputs), targets).backward()
    return [same, between, row.live > 0, planned["peak"] == planned["planned"], slept]


def test_kept_storage_has_its_place_and_its_values(pool_of):
    assert pool_of(2).run(places_of_full_parameters, True) == 2 * [
        [True, True, True, True, 0]
    ]
    assert pool_of(2).run(places_of_full_parameters, False) == 2 * [
        [False, "lowtide", False, True, 0]
    ]


class Interrupted(Exception):
    pass


def train_interrupted(system_name: str, where: str | None) -> Record:
    """The second step ends behind its first microbatch, or in its second one: in the
    last layer's forward, or in the first one's backward. It is begun anew.

    `where` None: nothing ends before its end."""
    model = llama(get_system(system_name), Setting())
    optimizer = adamw(model, foreach=False)
    record = Recorder()

    def interrupt(*_: Any) -> None:
        raise Interrupted

    def fail(where: str, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        first, last = (layer.ffn_norm for layer in model.layers)
        hook = (
            last.register_forward_hook(interrupt)
            if where == "forward"
            else first.register_full_backward_hook(interrupt)
        )
        with pytest.raises(Interrupted):
            loss_fn(model(inputs), targets).backward()
        hook.remove()

    def step(number: int, interrupted: bool) -> None:
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            inputs, targets = batch(CONFIG, number, microbatch, dist.get_rank())
            if interrupted and microbatch == 1:
                if where != "between":
                    fail(where, inputs, targets)
                return
            loss = loss_fn(model(inputs), targets)
            if not interrupted:
                record.add("loss", loss)
            loss.backward()

    for number in range(NUM_STEPS):
        if number == 1 and where:
            step(number, True)
            model.reset_iter_state()  # drops the first microbatch's gradients
            if where == "backward":
                optimizer.zero_grad()  # those of the units that were reduced
        step(number, False)
        finish_step(model, optimizer, record)
    return record.values


@pytest.mark.parametrize("where", ["between", "forward", "backward"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_interrupted_step_is_begun_anew(pool_of, num_ranks, where):
    """FSDP2 of 2.13 and 2.14 keeps what was summed before, of older ones all."""
    programs = [("lowtide", where)]
    if VERSION >= (2, 15):
        programs.append(("fsdp2", where))
    expected = pool_of(num_ranks).run(train_interrupted, "fsdp2", None)
    for program in programs:
        records = pool_of(num_ranks).run(train_interrupted, *program)
        for record, other in zip(records, expected, strict=True):
            assert_same_records(record, other)


def call_other_methods(system_name: str) -> Record:
    """`encode` and `decode` instead of forward, under gradient and without."""
    import lowtide

    system = get_system(system_name)
    torch.manual_seed(0)

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 5)
            self.out = nn.Linear(5, 4)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x))

        def decode(self, *, code: torch.Tensor) -> torch.Tensor:
            return self.out(code)

    model: Any = Coder()
    system.fully_shard(model.inner)
    system.fully_shard(model)
    system.prepare(model)
    register = lowtide.register_fsdp_forward_method
    for name in ("encode", "decode"):
        register(model, name)
    register(nn.Linear(1, 1), "forward")  # nothing happens
    record = Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        x = torch.full((2, 4), float(step + dist.get_rank()))
        with torch.no_grad():
            record.add("encoded", model.encode(x))
        model.decode(code=model.encode(x)).pow(2).sum().backward()
        finish_step(model, optimizer, record)
    return record.values


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_registered_forward_methods(pool_of, num_ranks):
    pool = pool_of(num_ranks)
    assert_trains_as_fsdp2(pool, call_other_methods)


def train_two_roots(system_name: str) -> Record:
    """Two roots on one group that share a context, called in turn."""
    from torch.distributed.fsdp import share_comm_ctx

    import lowtide

    assert lowtide.share_comm_ctx is share_comm_ctx
    system = get_system(system_name)
    models = [llama(system, Setting()) for _ in range(2)]
    share_comm_ctx(models)
    optimizers = [adamw(model, foreach=False) for model in models]
    record = Recorder()
    for step in range(NUM_STEPS):
        inputs, targets = batch(CONFIG, step, 0, dist.get_rank())
        loss = sum(loss_fn(model(inputs), targets) for model in models)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            finish_step(model, optimizer, record)
    return record.values


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_two_roots_share_a_context(pool_of, num_ranks):
    pool = pool_of(num_ranks)
    assert_trains_as_fsdp2(pool, train_two_roots)


def gradients_of_two_backwards(
    system_name: str, finalize: bool
) -> tuple[list[torch.Tensor], bool]:
    """Those of a step, and whether there were any before they were reduced."""
    model: Any = llama(get_system(system_name), Setting())
    early = False
    if finalize:
        model.set_manual_backward_finalization(True)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1 and not finalize)
        inputs, targets = batch(CONFIG, 0, micro, dist.get_rank())
        loss_fn(model(inputs), targets).backward()
    if finalize:
        assert model.finalize_backward() is None  # without sync
        early = any(p.grad is not None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        model.finalize_backward(async_op=True).wait()
    return [local(p.grad) for p in model.parameters()], early


FINALIZED_BY_HAND = ("lowtide", "fsdp2") if VERSION >= (2, 15) else ("lowtide",)


@pytest.mark.parametrize("system_name", FINALIZED_BY_HAND)
def test_gradients_are_finalized_by_hand(pool_of, system_name):
    pool = pool_of(2)
    for (by_hand, early), (other, _) in zip(
        pool.run(gradients_of_two_backwards, system_name, True),
        pool.run(gradients_of_two_backwards, "lowtide", False),
        strict=True,
    ):
        assert not early and all(map(torch.equal, by_hand, other))


def hook_stream_error() -> str:
    from lowtide import fully_shard

    module: Any = fully_shard(nn.Linear(2, 2))
    try:
        module.set_all_reduce_hook(print, stream="a stream")
    except NotImplementedError as error:
        return str(error)
    return "no error"


def test_stream_of_the_hook_is_refused(pool_of):
    assert pool_of(1).run(hook_stream_error) == [
        "lowtide: FSDPModule.set_all_reduce_hook: expected stream=None, got a stream. "
        "Switch to it inside the hook, and make the current stream wait for it."
    ]
