"""Autograd's corners beside FSDP2: the same bits, and None where FSDP2 leaves None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.bits import same_bits
from support.recorder import Record, Recorder, assert_same_records, finish_step
from support.systems import System, get_system

NUM_STEPS = 3
Pattern = Callable[[System, Recorder], None]


class Blocks(nn.Module):
    """Three layers in a row; `calls` says in which order they run."""

    def __init__(self, calls: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.calls = calls
        self.wrap_call: Callable[..., Any] = lambda layer, x: layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.calls:
            x = torch.tanh(self.wrap_call(self.layers[i], x))
        return x


def wrap(system: System, model: Any, units: Any) -> Any:
    for unit in units:
        system.fully_shard(unit)
    system.fully_shard(model)
    system.prepare(model)
    return model


def blocks(system: System, calls: tuple[int, ...] = (0, 1, 2)) -> Any:
    torch.manual_seed(0)
    model = Blocks(calls)
    return wrap(system, model, model.layers)


def data(step: int, *, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, 5, generator=generator, requires_grad=grad)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def train(model: Any, record: Recorder, loss: Callable[[int], torch.Tensor]) -> None:
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        value = loss(step)
        record.add("loss", value)
        value.backward()
        finish_step(model, optimizer, record)


def layer_used_three_times(system: System, record: Recorder) -> None:
    model = blocks(system, (0, 1, 0, 2, 0))
    train(model, record, lambda step: model(data(step)).pow(2).sum())


def layer_unused_everywhere(system: System, record: Recorder) -> None:
    model = blocks(system, (0, 2))
    train(model, record, lambda step: model(data(step)).pow(2).sum())
    assert all(p.grad is None for p in model.layers[1].parameters())


def layer_used_in_some_steps(system: System, record: Recorder) -> None:
    model = blocks(system)
    optimizer = sgd(model)
    for step in range(4):
        model.calls = (0, 1, 2) if step % 2 else (2, 0)
        model(data(step)).pow(2).sum().backward()
        finish_step(model, optimizer, record)


def no_grad_forward_between(system: System, record: Recorder) -> None:
    model = blocks(system)

    def loss(step: int) -> torch.Tensor:
        value = model(data(step)).pow(2).sum()
        with torch.no_grad():
            record.add("teacher", model(data(step + 7)))
        return value

    train(model, record, loss)


def eval_between(system: System, record: Recorder) -> None:
    model = blocks(system)

    def loss(step: int) -> torch.Tensor:
        value = model(data(step)).pow(2).sum()
        model.eval()
        with torch.inference_mode():
            record.add("eval", model(data(step + 7)).clone())
        model.train()
        return value

    train(model, record, loss)


def gradient_of_the_input_alone(system: System, record: Recorder) -> None:
    """torch.autograd.grad and backward(inputs=) leave every `.grad` as it was."""
    model = blocks(system)
    for step in range(NUM_STEPS):
        x = data(step, grad=True)
        (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), x)
        record.add("grad", gradient)
        record.add_model(model)
        x = data(step, grad=True)
        model(x).pow(2).sum().backward(inputs=[x])
        record.add("x.grad", x.grad)
        record.add_model(model)
    train(model, record, lambda step: model(data(step)).pow(2).sum())


def gradient_penalty_without_graph(system: System, record: Recorder) -> None:
    model = blocks(system)

    def loss(step: int) -> torch.Tensor:
        x = data(step, grad=True)
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y.pow(2).sum() + gradient.norm()

    train(model, record, loss)


def retained_three_times(system: System, record: Recorder) -> None:
    model = blocks(system)
    for step in range(NUM_STEPS):
        loss = model(data(step)).pow(2).sum()
        for last in (False, False, True):
            loss.backward(retain_graph=not last)
        record.add_model(model)
        model.zero_grad()


class Convolutions(nn.Module):
    """Channels last, a transposed and an expanded gradient, a sliced weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.mix = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        z = y @ self.mix[:, ::2] + (self.mix.t() @ y.t()).t()[:, :3]
        return z.sum() + self.scale.expand(7, 4).sum()


def gradients_of_any_layout(system: System, record: Recorder) -> None:
    torch.manual_seed(0)
    model: Any = Convolutions()
    model = wrap(system, model, [model.conv])

    def loss(step: int) -> torch.Tensor:
        return model(data(step)[:, :, None, None].expand(3, 5, 6, 6)[:, :3] * 1.5)

    train(model, record, loss)


class Answer(NamedTuple):
    main: torch.Tensor
    rest: dict[str, list[torch.Tensor]]


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, *, x: torch.Tensor, scale: float = 1.0) -> Answer:
        y = self.layers[0](x)
        return Answer(y * scale, {"more": [self.layers[1](y), y.detach()]})


def keywords_and_nested_outputs(system: System, record: Recorder) -> None:
    torch.manual_seed(0)
    model: Any = KeywordOnly()
    model = wrap(system, model, model.layers)

    def loss(step: int) -> torch.Tensor:
        answer = model(x=data(step), scale=0.5)
        assert type(answer) is Answer
        return answer.main.sum() + answer.rest["more"][0].pow(2).sum()

    train(model, record, loss)


def checkpointing(around: bool, reentrant: bool) -> Pattern:
    def pattern(system: System, record: Recorder) -> None:
        torch.manual_seed(0)
        model: Any = Blocks()
        if around:
            model.wrap_call = lambda layer, x: checkpoint(
                layer, x, use_reentrant=reentrant
            )
        else:
            for layer in model.layers:
                inner = layer.forward
                layer.forward = lambda x, inner=inner: checkpoint(
                    inner, x, use_reentrant=reentrant
                )
        model = wrap(system, model, model.layers)
        # Re-entrant checkpointing needs an input that requires grad.
        train(model, record, lambda step: model(data(step, grad=True)).pow(2).sum())

    pattern.__name__ = (
        f"{'re-entrant' if reentrant else 'non-re-entrant'}_checkpoint_"
        f"{'around' if around else 'inside'}"
    )
    return pattern


def alternating_adversaries(system: System, record: Recorder) -> None:
    """Two models on one group; each step trains one with the other frozen."""
    models = [blocks(system), blocks(system, (2, 1, 0))]
    optimizers = [sgd(model) for model in models]
    for step in range(4):
        trained = step % 2
        for i, model in enumerate(models):
            model.requires_grad_(i == trained)
        y = models[1](models[0](data(step)))
        (y.sum() if trained else -y.sum()).backward()
        for i, model in enumerate(models):
            record.add_model(model)
            if i == trained:
                optimizers[i].step()
            model.zero_grad()


class LowRank(nn.Module):
    """A frozen layer and its trainable low-rank update, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.down = nn.Linear(5, 2, bias=False)
        self.up = nn.Linear(2, 5, bias=False)
        self.register_buffer("offset", torch.linspace(-1, 1, 5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.base(x) + self.up(self.down(x)) + self.offset


def low_rank_updates(system: System, record: Recorder) -> None:
    """Frozen bases; unfrozen half way, as after a warm-up."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(LowRank(), nn.Tanh(), LowRank())
    model = wrap(system, model, [model[0], model[2]])
    for step in range(4):
        if step == 2:
            model.requires_grad_(True)
        optimizer = torch.optim.SGD([p for p in model.parameters()], lr=0.1)
        model(data(step)).pow(2).sum().backward()
        finish_step(model, optimizer, record)
    for name, buffer in model.named_buffers():
        record.add(name, buffer)


def exponential_average(system: System, record: Recorder) -> None:
    """A second sharded model follows the first."""
    model, average = blocks(system), blocks(system)
    average.load_state_dict(model.state_dict())
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        model(data(step)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, other in zip(
                average.parameters(), model.parameters(), strict=True
            ):
                mine.lerp_(other, 0.25)
            record.add("teacher", average(data(step)))
        record.add_model(average)


def scaled_gradients(system: System, record: Recorder) -> None:
    """GradScaler; in step 1 an infinity makes every rank skip."""
    model = blocks(system)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(4):
        loss = model(data(step)).pow(2).sum()
        if step == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        record.add_model(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        record.add("scale", torch.tensor(scaler.get_scale()))
    record.add_model(model)


def hooks(system: System, record: Recorder) -> None:
    """User hooks: when they fire and with what. Post-accumulate hooks fire once a
    backward, when `.grad` is there: FSDP2's before the units below run backward,
    lowtide's at the end."""
    model = blocks(system)
    layer = model.layers[1]

    def log(name: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            for i, value in enumerate(args):
                values = value if isinstance(value, tuple | list) else [value]
                for one in values:
                    if isinstance(one, torch.Tensor):
                        record.add(f"{name} {i} {type(one).__name__}", one)

        return hook

    layer.register_forward_pre_hook(log("forward pre"))
    layer.register_forward_hook(log("forward"))
    layer.register_full_backward_pre_hook(log("backward pre"))
    layer.register_full_backward_hook(log("backward"))
    model.register_state_dict_post_hook(lambda *args: record.add("saved", None))
    model.register_load_state_dict_pre_hook(lambda *args: record.add("loading", None))
    late = Recorder()
    for name, p in model.named_parameters():

        def accumulated(p: Any, name: str = name) -> None:
            late.add(f"accumulated {name} {p.grad.placements}", p.grad)

        if name == "layers.2.weight":
            p.register_post_accumulate_grad_hook(accumulated)
    train(model, record, lambda step: model(data(step)).pow(2).sum())
    model.load_state_dict(model.state_dict())
    assert len(late.values) == NUM_STEPS
    record.values += late.values


def mixed_with_plain_autograd(system: System, record: Recorder) -> None:
    """A parameter outside of the sharded model, and a detached branch."""
    model = blocks(system)
    scale = torch.ones(5, requires_grad=True)

    def loss(step: int) -> torch.Tensor:
        y = model(data(step)) * scale
        return y.sum() + y.detach().pow(2).sum()

    train(model, record, loss)
    record.add("scale.grad", scale.grad)


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        layer_used_three_times,
        layer_unused_everywhere,
        layer_used_in_some_steps,
        no_grad_forward_between,
        eval_between,
        gradient_of_the_input_alone,
        gradient_penalty_without_graph,
        retained_three_times,
        gradients_of_any_layout,
        keywords_and_nested_outputs,
        checkpointing(around=True, reentrant=True),
        checkpointing(around=True, reentrant=False),
        checkpointing(around=False, reentrant=True),
        checkpointing(around=False, reentrant=False),
        alternating_adversaries,
        low_rank_updates,
        exponential_average,
        scaled_gradients,
        hooks,
        mixed_with_plain_autograd,
    )
}


def record_pattern(system: str, pattern: str) -> Record:
    record = Recorder()
    PATTERNS[pattern](get_system(system), record)
    return record.values


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_equals_fsdp2(pool_of, pattern, num_ranks):
    pool = pool_of(num_ranks)
    theirs = pool.run(record_pattern, "fsdp2", pattern, timeout=40)
    ours = pool.run(record_pattern, "lowtide", pattern, timeout=40)
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) >= NUM_STEPS
        assert_same_records(mine, other)


# -- what FSDP2 does not do ---------------------------------------------------------


class Choice(nn.Module):
    """Equal and unequal layers, chosen by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.wide = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


def choose(orders: tuple[tuple[int, ...], ...], units: bool) -> Record:
    """Rank r calls the layers in orders[r]."""
    system = get_system("lowtide")
    torch.manual_seed(0)
    model: Any = Choice()
    model = wrap(system, model, model.layers if units else [])
    record = Recorder()
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        order = orders[dist.get_rank()]
        model(data(step), order).pow(2).sum().backward()
        for name, p in model.named_parameters():
            record.add(name, p.grad.full_tensor() if p.grad is not None else None)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            record.add(name, p.full_tensor())
    return record.values


def choose_by_rule(orders: tuple[tuple[int, ...], ...]) -> Record:
    """All ranks' batches one after the other, gradients averaged."""
    torch.manual_seed(0)
    model = Choice()
    record = Recorder()
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        by_rank = []
        for rank, order in enumerate(orders):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(3, 5, generator=generator)
            model.zero_grad()
            model(x, order).pow(2).sum().backward()
            by_rank.append([p.grad for p in model.parameters()])
        for (name, p), *grads in zip(model.named_parameters(), *by_rank, strict=True):
            used = [g for g in grads if g is not None]
            p.grad = sum(used) / len(orders) if used else None  # type: ignore
            record.add(name, p.grad)
        optimizer.step()
        for name, p in model.named_parameters():
            record.add(name, p)
    return record.values


ORDERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "unused_on_one_rank": ((0, 1, 2), (0, 2)),
    "another_on_each_rank": ((0,), (1, 2)),
    "another_order_of_completion": ((0, 1, 2), (2, 1, 0)),
    "unused_on_all_ranks": ((0, 2), (2, 0)),
}


@pytest.mark.parametrize("orders", ORDERS)
def test_ranks_may_use_a_unit_differently(pool_of, orders):
    """One unit; where each layer is its own, ranks must run them alike."""
    by_rank = pool_of(2).run(choose, ORDERS[orders], False)
    expected = pool_of(1).run(choose_by_rule, ORDERS[orders])[0]
    for record in by_rank:
        assert_same_records(record, expected)
    left = [name for name, value in expected[:8] if value is None]
    unused = ["layers.1.weight", "layers.1.bias"] if "all" in orders else []
    assert left == [*unused, "wide.weight", "wide.bias"]


def sparse_embedding(sparse: bool) -> list[torch.Tensor]:
    system = get_system("lowtide")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 2))
    model = wrap(system, model, [model[0]])
    ids = torch.tensor([[1, 5, 5], [0, 8, dist.get_rank()]])
    model(ids).pow(2).sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sparse_gradient_of_an_embedding_arrives_dense(pool_of, num_ranks):
    pool = pool_of(num_ranks)
    for sparse, dense in zip(
        pool.run(sparse_embedding, True),
        pool.run(sparse_embedding, False),
        strict=True,
    ):
        assert all(same_bits(a, b) for a, b in zip(sparse, dense, strict=True))


def many_microbatches(system_name: str) -> Record:
    system = get_system(system_name)
    model = blocks(system)
    record = Recorder()
    for microbatch in range(128):
        model.set_requires_gradient_sync(microbatch == 127)
        model(data(microbatch)).pow(2).sum().backward()
    record.add_model(model)
    return record.values


def test_128_microbatches_on_one_rank(pool_of):
    pool = pool_of(1)
    assert_same_records(
        pool.run(many_microbatches, "lowtide")[0],
        pool.run(many_microbatches, "fsdp2")[0],
    )
