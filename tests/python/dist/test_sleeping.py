"""``lowtide.sleep`` and ``lowtide.wake``: what sleeps has no bytes, what wakes has the
same ones, and training does not know."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import lowtide
from lowtide import sleeping
from lowtide._base.memory import device_memory, ledger
from lowtide._sharding.unit import units_of
from lowtide.sleeping import host_pool
from support.bits import assert_same_tensors, same_bits
from support.model import batch, loss_fn
from support.models import MODELS
from support.optimizers import OPTIMIZERS, WIDE, compiling, config_of, everything
from support.saving import SMALL, backward, make
from support.training import local

CPU = torch.device("cpu")
# No rank without rows: it would not raise, and wait for those that do.
EVEN = dataclasses.replace(SMALL, logit_scale=False)
STEPS = 3


def leased(expected: int | None = None) -> int:
    """A thread of gloo lets go of a call's tensors a moment after the call is over: as
    many bytes as are ``expected``, or the least of some moments."""
    live = [ledger(CPU).total_live]
    for _ in range(20 if expected is None else 1000):
        if live[-1] == expected:
            break
        time.sleep(0.005)
        live.append(ledger(CPU).total_live)
    return live[-1] if expected is not None else min(live)


def leaves(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = sleeping._parts_of(model, [*optimizers], [*sleeping.PARTS])
    return [t for _, _, tensors in found for _, t in tensors if t.numel() > 0]


@contextlib.contextmanager
def asleep(
    model: nn.Module, *optimizers: torch.optim.Optimizer, held: int
) -> Iterator[None]:
    """``held``: bytes that were leased before there was a model."""
    tensors = leaves(model, *optimizers)
    assert tensors and ledger(CPU).total_live > held
    lowtide.sleep(model, optimizers)
    assert leased(held) == held
    for tensor in tensors:
        with pytest.raises(RuntimeError, match="expected one that is awake, got"):
            tensor.sum()
        with pytest.raises(RuntimeError, match="expected one that is awake, got"):
            tensor.zero_()
    yield
    lowtide.wake(model, optimizers)
    assert not sleeping._asleep and sleeping._guard is None


# -- training does not know -----------------------------------------------------------


def one_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    step: int,
    nap: Callable[[], None],
    **settings: Any,
) -> None:
    """Two microbatches, the first without sync, and a nap wherever one may be taken."""
    nap()
    model.set_requires_gradient_sync(False)
    backward(model, 2 * step, **settings)
    nap()
    model.set_requires_gradient_sync(True)
    backward(model, 2 * step + 1, **settings)
    nap()
    backward(model, 2 * step + 1, **settings)  # adds to gradients that slept
    nap()
    optimizer.step()
    nap()
    optimizer.zero_grad()


def train(
    name: str, naps: bool, **settings: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All that there is in the end, and before and after each nap."""
    config = settings.pop("config", config_of(name))
    held = leased()
    torch.manual_seed(dist.get_rank())
    model, _ = make(config=config, **settings)
    optimizer = OPTIMIZERS[name](model)
    pairs = []

    def nap() -> None:
        if naps:
            before, known = everything(model, optimizer), set(optimizer.state)
            tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
            views = [local(t).view(-1) for t in tensors if t is not None]
            seen = [view.clone() for view in views]
            with asleep(model, optimizer, held=held):
                pass
            assert set(optimizer.state) == known
            now = [*model.parameters(), *(p.grad for p in model.parameters())]
            assert all(a is b for a, b in zip(now, tensors, strict=True))
            assert all(map(torch.equal, views, seen))
            pairs.append((everything(model, optimizer), before))

    with compiling(name, []):
        for step in range(STEPS):
            one_step(model, optimizer, step, nap, config=config)
    return everything(model, optimizer), pairs


def train_both(name: str, **settings: Any) -> None:
    end, pairs = train(name, True, **settings)
    assert len(pairs) == 5 * STEPS
    for number, (after, before) in enumerate(pairs):
        assert_same_tensors(after, before, f"nap {number}")
    assert_same_tensors(end, train(name, False, **settings)[0], "the end")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_does_not_know_of_naps(pool_of, world_size, name):
    pool_of(world_size).run(train_both, name)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS: dict[str, dict[str, Any]] = {
    "cast": {"mp_policy": BF16},
    "kept": {"reshard_after_forward": False},
    "kept in part": {"reshard_after_forward": 2},
    "one unit": {"wrapping": "root"},
    "fused gradients": {"grads": "fused"},
    "frozen": {"config": dataclasses.replace(SMALL, frozen=("*.w1.*",))},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_nor_of_them_under(pool_of, settings):
    pool_of(2).run(train_both, "foreach", **SETTINGS[settings])


def test_nor_of_them_with_replicas(pool_of):
    pool_of(4).run(train_both, "foreach", mesh="replicas")


def replicas_without_all_reduce() -> None:
    """What was reduced over the shards waits for the sum over the replicas."""

    def run(naps: bool) -> dict[str, Any]:
        held = leased()
        torch.manual_seed(0)
        model, optimizer = make(mesh="replicas")
        for step in range(2):
            model.set_requires_all_reduce(False)
            backward(model, step)
            if naps:
                with asleep(model, optimizer, held=held):
                    pass
            model.set_requires_all_reduce(True)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    assert_same_tensors(run(True), run(False), "the end")


def test_what_waits_for_the_replicas_sleeps(pool_of):
    pool_of(4).run(replicas_without_all_reduce)


# -- what others made -----------------------------------------------------------------


def not_of_lowtide(sharded: bool) -> None:
    """torch's FSDP2, whose parameters are views of flat tensors; a plain model."""

    def run(naps: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        if sharded:
            model, optimizer = make(system="fsdp2")
        else:
            model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
            optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
        for step in range(STEPS):
            if sharded:
                backward(model, step)
            else:
                model(torch.randn(4, 8)).sum().backward()
            if naps:
                before = everything(model, optimizer)
                lowtide.sleep(model, optimizer)
                with pytest.raises(RuntimeError, match="is awake"):
                    next(model.parameters()).sum()
                lowtide.wake(model, optimizer)
                assert_same_tensors(everything(model, optimizer), before, "a nap")
            optimizer.step()
            optimizer.zero_grad()
        if sharded and naps:  # the root stays gathered
            with torch.no_grad():
                model(batch(SMALL, 1, 0, dist.get_rank())[0])
            lowtide.sleep(model, optimizer)
            assert all(isinstance(p, DTensor) for p in model.parameters())
            lowtide.wake(model, optimizer)
        return everything(model, optimizer)

    assert_same_tensors(run(True), run(False), "the end")


@pytest.mark.parametrize("sharded", [True, False])
def test_a_model_that_lowtide_does_not_shard_sleeps(pool_of, sharded):
    pool_of(2).run(not_of_lowtide, sharded)


def of_torchao() -> tuple[Any, torch.optim.Optimizer, Callable[[int], torch.Tensor]]:
    """Weights that keep their values themselves, and send others."""
    from torchao import quantize_
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    model: Any = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(3))
    )
    quantize_(model, int8_mixed_precision_training())
    for unit in (*model, model):
        lowtide.fully_shard(unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return model(torch.randn(4, 64, generator=generator)).sum()

    return model, optimizer, loss


def of_transformers() -> tuple[
    Any, torch.optim.Optimizer, Callable[[int], torch.Tensor]
]:
    """Logits are deferred: the loss streams the head's rows."""
    model = MODELS["llama"].build()
    model.config.use_cache = False
    with contextlib.redirect_stdout(io.StringIO()):
        lowtide.wrap(model, activations=lowtide.ActivationPolicy(offload=["input"]))
    parameters = lowtide.local_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    def loss(step: int) -> torch.Tensor:
        return MODELS["llama"].loss(model, torch.Generator().manual_seed(step))

    return model, optimizer, loss


def of_others(make: Callable[[], Any]) -> None:
    def run(naps: bool) -> tuple[list[float], list[torch.Tensor]]:
        held, losses = leased(), []
        torch.manual_seed(0)
        model, optimizer, loss_of = make()
        for step in range(STEPS):
            loss = loss_of(step)
            losses.append(loss.item())
            loss.backward()
            if naps:
                del loss
                with asleep(model, optimizer, held=held):
                    with pytest.raises(RuntimeError, match="is awake|are awake"):
                        loss_of(step)
            optimizer.step()
            optimizer.zero_grad()
        model.reshard()
        return losses, [leaf.clone() for leaf in leaves(model, optimizer)]

    (losses, ours), (expected_losses, expected) = run(True), run(False)
    assert losses == expected_losses
    assert all(map(same_bits, ours, expected)) and len(ours) == len(expected)


@pytest.mark.parametrize("make", [of_torchao, of_transformers])
def test_what_others_made_sleeps(pool_of, make):
    pool_of(2).run(of_others, make)


def loaded() -> None:
    """The optimizer keeps what torch.load has made."""
    model, optimizer = make()
    backward(model, 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))
    before, held = everything(model, optimizer), leased()
    with asleep(model, optimizer, held=0):
        pass
    assert leased(held) == held
    assert_same_tensors(everything(model, optimizer), before, "loaded")


def test_states_that_torch_has_loaded_sleep(pool_of):
    pool_of(2).run(loaded)


# -- who does not let it sleep --------------------------------------------------------


def add_to_gradients_asleep(synced: bool) -> None:
    """Gradients alone sleep, and a microbatch adds to them: it raises on every rank,
    and the step is begun anew, as after any exception."""

    def run(disturbed: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model, optimizer = make(config=EVEN)
        for again in (True, False) if disturbed else (False,):
            model.set_requires_gradient_sync(synced)
            backward(model, 0, EVEN)
            model.set_requires_gradient_sync(True)
            if again:
                lowtide.sleep(model, optimizer, parts=("gradients",))
                with pytest.raises(RuntimeError, match="expected one that is awake"):
                    backward(model, 1, EVEN)
                lowtide.wake(model, optimizer)
                lowtide.abort_step(model)
            else:
                backward(model, 1, EVEN)
        optimizer.step()
        return everything(model, optimizer)

    assert_same_tensors(run(True), run(False), "the end")


@pytest.mark.parametrize("synced", [True, False])
def test_gradients_that_sleep_are_not_added_to(pool_of, synced):
    pool_of(2).run(add_to_gradients_asleep, synced)


def disturb(path: Path) -> dict[str, str]:
    model, optimizer = make(config=EVEN)
    backward(model, 0, EVEN)
    optimizer.step()
    inputs, targets = batch(EVEN, 1, 0, dist.get_rank())
    loss = loss_fn(model(inputs), targets)
    state = model.state_dict()
    before = everything(model, optimizer)
    acts: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(inputs),
        "backward": loss.backward,
        "unshard": model.unshard,
        "step": optimizer.step,
        "clip": lambda: lowtide.clip_grad_norm_(model.parameters(), 1.0),
        "torch's clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "save": lambda: lowtide.save(path, model, optimizer),
        "torch.save": lambda: torch.save(state, io.BytesIO()),
        "copy": lambda: {name: value.clone() for name, value in state.items()},
        "load_state_dict": lambda: model.load_state_dict(
            {name: torch.zeros_like(value) for name, value in state.items()}
        ),
        "to": lambda: model.to(torch.float64),
        "lowtide.step": lambda: lowtide.step(model, optimizer).__enter__(),
    }
    said = {}
    lowtide.sleep(model, optimizer)
    for name, act in acts.items():
        try:
            act()
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    lowtide.sleep(model, optimizer)  # it does
    lowtide.wake(model, optimizer)
    assert_same_tensors(everything(model, optimizer), before, "disturbed")
    lowtide.wake(model, optimizer)
    return said


def test_whoever_disturbs_it_raises(pool_of, tmp_path):
    for said in pool_of(2).run(disturb, tmp_path):
        for name, text in said.items():
            assert "awake" in text and "lowtide.wake(model" in text, (name, text)
        assert "unit 'Llama'" in said["forward"], said["forward"]
        assert "AdamW: expected a model and states" in said["step"], said["step"]
        assert ".grad: expected one that is awake" in said["clip"], said["clip"]


# -- parts ----------------------------------------------------------------------------


def in_parts() -> None:
    model, optimizer = make()
    backward(model, 0)
    optimizer.step()
    before = everything(model, optimizer)
    inputs, _ = batch(SMALL, 1, 0, dist.get_rank())
    with torch.no_grad():
        logits = model(inputs)

    lowtide.sleep(model, optimizer, parts=["states"])
    backward(model, 1)
    with pytest.raises(RuntimeError, match="got state 'step' of parameter 0 that sl"):
        optimizer.step()
    model.zero_grad()
    lowtide.sleep(model)  # parameters, and gradients that there are none of
    lowtide.wake(model, parts=["parameters"])
    model.to("cpu")  # swaps parameters, as verl does before it hands them on
    with torch.no_grad():
        assert torch.equal(model(inputs), logits)
    with pytest.raises(RuntimeError, match="that sleeps"):
        optimizer.step()
    lowtide.wake(model.layers[0], optimizer)
    model.reshard()
    after = everything(model, optimizer)
    without = {n: v for n, v in before.items() if not n.endswith(".grad")}
    assert_same_tensors({n: after[n] for n in without}, without, "in parts")

    for function in (lowtide.sleep, lowtide.wake):
        with pytest.raises(ValueError, match="expected parts of parameters, gradients"):
            function(model, parts=["weights"])


def test_parts_sleep_and_wake_alone(pool_of):
    pool_of(2).run(in_parts)


def one_of_many() -> None:
    """A unit wakes by itself, or with the model."""
    model, optimizer = make()
    backward(model, 0)
    before = everything(model, optimizer)
    lowtide.sleep(model.layers[0])
    with pytest.raises(RuntimeError, match=r"unit 'layers\.0': expected parameters"):
        backward(model, 0)
    lowtide.wake(model)
    lowtide.abort_step(model)  # the forward that did not come to its end
    after = everything(model, optimizer)
    kept = [name for name in before if not name.endswith(".grad")]
    assert_same_tensors(
        {name: after[name] for name in kept},
        {name: before[name] for name in kept},
        "one unit",
    )
    backward(model, 0)


def test_a_unit_sleeps_alone(pool_of):
    pool_of(2).run(one_of_many)


def beside_one_that_is_awake() -> None:
    asleep, awake = make(), make()
    lowtide.sleep(*asleep)
    backward(awake[0], 0)
    awake[1].step()
    awake[0].to("cpu")  # which swaps parameters, if nobody refers to them weakly
    lowtide.wake(*asleep)


def test_others_are_left_alone(pool_of):
    pool_of(2).run(beside_one_that_is_awake)


# -- what changes meanwhile -----------------------------------------------------------


def cleared() -> None:
    """Gradients, those of microbatches too, that are cleared while they sleep, are."""

    def run(when: str) -> dict[str, Any]:
        torch.manual_seed(0)
        model, optimizer = make()
        for sync in (True, False):
            model.set_requires_gradient_sync(sync)
            backward(model, 0)
        if when == "asleep":
            lowtide.sleep(model, optimizer)
        optimizer.zero_grad()
        if when == "asleep":
            held = ledger(CPU).live()["sharded_gradients"]
            lowtide.wake(model, optimizer)
            assert ledger(CPU).live()["sharded_gradients"] == held
        model.set_requires_gradient_sync(True)
        backward(model, 1)
        return everything(model, optimizer)

    assert_same_tensors(run("asleep"), run("awake"), "cleared")


def test_what_is_cleared_does_not_come_back(pool_of):
    pool_of(2).run(cleared)


def without_memory() -> None:
    model, optimizer = make()
    backward(model, 0)
    optimizer.step()
    before = everything(model, optimizer)
    lowtide.sleep(model, optimizer)
    held = leased()
    names = [state.unit.name for state in units_of(model.modules())]
    device_memory(CPU).fail_next_lease("parameters", names[0])
    with pytest.raises(torch.OutOfMemoryError, match="no memory for them"):
        lowtide.wake(model, optimizer)
    assert leased(held) == held
    with pytest.raises(RuntimeError, match="parameters that are awake"):
        backward(model, 1)
    lowtide.wake(model, optimizer)
    assert_same_tensors(everything(model, optimizer), before, "woken at last")
    backward(model, 1)


def test_what_finds_no_memory_sleeps_on(pool_of):
    pool_of(2).run(without_memory)


def again_and_again() -> None:
    """Host memory is registered once; that of a model that is gone serves others."""
    for _ in range(2):
        model, optimizer = make(config=WIDE)
        backward(model, 0, WIDE)
        optimizer.step()
        figures = []
        for _ in range(3):
            lowtide.sleep(model, optimizer)
            asleep = host_pool(CPU).ledger.total_live
            lowtide.wake(model, optimizer)
            figures.append((asleep, host_pool(CPU).figures()["pinned_bytes"]))
            assert host_pool(CPU).ledger.total_live == 0
        assert len(set(figures)) == 1, figures
        lowtide.sleep(model, optimizer)
        del model, optimizer
        gc.collect()
        assert not sleeping._asleep
        assert host_pool(CPU).ledger.total_live == 0


def test_host_memory_is_kept_for_the_next_time(pool_of):
    pool_of(2).run(again_and_again)


def inside_of_backward() -> None:
    model, _ = make()
    inputs, targets = batch(SMALL, 1, 0, dist.get_rank())
    loss = loss_fn(model(inputs), targets)
    loss.register_hook(lambda _: lowtide.sleep(model))
    with pytest.raises(RuntimeError, match="sleep: expected no backward that runs"):
        loss.backward()


def test_nobody_sleeps_in_backward(pool_of):
    pool_of(2).run(inside_of_backward)
