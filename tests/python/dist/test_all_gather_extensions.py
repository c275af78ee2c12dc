"""Parameters of tensor subclasses that say what is gathered for them
(`fsdp_pre_all_gather`, `fsdp_post_all_gather`), beside FSDP2."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._sharding.unit import unit_state
from support import extended
from support.bits import assert_same_tensors
from support.ranks import RankPool
from support.systems import System, get_system

DIM = 8
Record = dict[str, Tensor | None]
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Sequential):
    """Blocks and a head, each a unit."""

    recomputes = False
    order: tuple[int, ...] = (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        *blocks, head = self
        for block in [blocks[i] for i in self.order]:
            if self.recomputes:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return head(x)


def net(kind: type, hidden: int = 16, blocks: int = 2) -> Any:
    torch.manual_seed(0)
    model = Net(*(Block(hidden) for _ in range(blocks)), nn.Linear(DIM, 4))
    return extended.extend(model, kind)


def wrap(
    system: System, model: Any, *, mesh: Any = None, mp: Any = None, **kwargs: Any
) -> Any:
    policy = system.MixedPrecisionPolicy(**(mp or {}))
    for block in list(model)[:-1]:
        system.fully_shard(block, mesh=mesh, mp_policy=policy, **kwargs)
    system.fully_shard(model, mesh=mesh, mp_policy=policy)
    system.prepare(model)
    return model


def batch(step: int, microbatch: int = 0) -> Tensor:
    seed = 100 * step + 10 * microbatch + dist.get_rank()
    return torch.randn(3, 5, DIM, generator=torch.Generator().manual_seed(seed))


def plain(tensor: Tensor) -> Tensor:
    """This rank's rows, without the subclass."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    return getattr(local, "_data", local).clone()


def train(
    model: Any,
    *,
    steps: int = 3,
    microbatches: int = 1,
    between: Callable[[Any], None] = lambda model: None,
) -> Record:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    record: Record = {}
    for step in range(steps):
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
            loss = model(batch(step, microbatch)).square().mean()
            loss.backward()
            record[f"{step}.{microbatch} loss"] = loss.detach()
        for name, p in model.named_parameters():
            assert p.grad is not None and type(plain(p.grad)) is Tensor
            record[f"{step} {name}.grad"] = plain(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            record[f"{step} {name}"] = plain(p)
        between(model)
    return record


def compare(pool: Any, scenario: Callable[..., Any], *args: Any) -> list[Any]:
    ours = pool.run(scenario, "lowtide", *args)
    for one, other in zip(ours, pool.run(scenario, "fsdp2", *args), strict=True):
        assert_same_tensors(one, other, scenario.__name__)
    return ours


# -- the same bits as FSDP2 ---------------------------------------------------------


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(batch(9))


def load_again(model: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for value in state.values():
        plain(value).add_(1)  # a copy, not what the model has
    model.load_state_dict(state)
    model.load_state_dict(state, assign=True)


FLOAT8, OF_MESH, OWN_BYTES = "float8", "float8, hook of the mesh", "bytes of its own"
RELEASING = "what was gathered is released"
KINDS = {
    FLOAT8: extended.Float8Weight,
    OF_MESH: extended.Float8WeightOfMesh,
    OWN_BYTES: extended.Bf16Weight,
    RELEASING: extended.Releasing,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bf16": {"mp": BF16},
    "kept after forward": {"mp": BF16, "reshard_after_forward": False},
    "without sync": {"mp": BF16, "microbatches": 3},
    "recomputed": {"mp": BF16, "recomputes": True},
    "evaluated between": {"between": evaluate},
    "loaded between": {"between": load_again},
}


def same_bits(system_name: str, kind: str, setting: str, shape: Any = None) -> Record:
    options = dict(SETTINGS[setting])
    model = net(KINDS[kind])
    model.recomputes = options.pop("recomputes", False)
    during = {k: options.pop(k) for k in ("between", "microbatches") if k in options}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")) if shape else None
    model = wrap(get_system(system_name), model, mesh=mesh, **options)
    return train(model, **during)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        *((FLOAT8, setting) for setting in SETTINGS),
        (OF_MESH, "defaults"),
        (OWN_BYTES, "bf16"),
        (OWN_BYTES, "recomputed"),
        (OWN_BYTES, "without sync"),
        (RELEASING, "bf16"),
        (RELEASING, "recomputed"),
        (RELEASING, "kept after forward"),
        (RELEASING, "loaded between"),
    ],
)
def test_steps_have_fsdp2s_bits(pool_of, kind, setting):
    compare(pool_of(2), same_bits, kind, setting)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_of_other_numbers_of_ranks(pool_of, num_ranks):
    compare(pool_of(num_ranks), same_bits, OWN_BYTES, "defaults")


def test_of_replicas(pool_of):
    compare(pool_of(4), same_bits, FLOAT8, "bf16", (2, 2))


def along_another_dimension(system_name: str) -> Record:
    return train(
        wrap(
            get_system(system_name),
            net(extended.Unpadded),
            shard_placement_fn=lambda p: Shard(1) if p.shape == (DIM, 16) else None,
        )
    )


def test_along_another_dimension(pool_of):
    compare(pool_of(2), along_another_dimension)


def smaller_groups(kind: str) -> tuple[Record, Record]:
    """What FSDP2 refuses: beside gathering everything again."""
    ours = []
    for reshard in (2, True):
        model = net(KINDS[kind])
        wrap(get_system("lowtide"), model, mp=BF16, reshard_after_forward=reshard)
        ours.append(train(model, steps=2))
    return ours[0], ours[1]


@pytest.mark.parametrize("kind", [FLOAT8, RELEASING])
def test_what_forward_keeps_in_part_is_gathered_from_neighbours(pool_of, kind):
    for kept, whole in pool_of(4).run(smaller_groups, kind):
        assert_same_tensors(kept, whole, "in parts")


def two_tensors(system_name: str) -> Record:
    """The full parameter's gradient, and what the module returns, is a subclass, too;
    nothing here but the hooks says how it is gathered."""

    def pre(self: Any, mesh: Any) -> Any:
        return (self.a, self.b), None

    def post(self: Any, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None):
        a, b = gathered
        if out is None:
            return TwoTensor(a, b).to(dtype), (a, b)
        if a.dtype != dtype:
            out.a.copy_(a)
            out.b.copy_(b)
        return None

    TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather = pre, post
    try:
        with torch.device("meta"):
            model: Any = nn.Sequential(*(nn.Linear(DIM, DIM, False) for _ in range(3)))
        for layer in model:
            weight = TwoTensor(layer.weight.detach(), layer.weight.detach().clone())
            layer.weight = nn.Parameter(weight)
        wrap(get_system(system_name), model, mp={"param_dtype": torch.bfloat16})
        model.to_empty(device="cpu")
        torch.manual_seed(5)
        for p in model.parameters():
            nn.init.trunc_normal_(p)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
        record: Record = {}
        for step in range(3):
            model(batch(step)).sum().backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                record[f"{step} {name}"] = plain(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            for name, p in model.named_parameters():
                assert type(p.to_local()) is TwoTensor
                record[f"{step} {name}.a"] = p.to_local().a.clone()
        return record
    finally:
        del TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather


def test_made_on_meta_and_initialised_in_place(pool_of):
    compare(pool_of(2), two_tensors)


def hooks_of_instances(system_name: str) -> Record:
    """Set where `fully_shard` and `to_empty` left a tensor."""

    def pre(self: Tensor, *rest: Any) -> Any:
        return (self.to(torch.bfloat16),), None

    def pre_of_five(
        self: Tensor, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
    ) -> Any:
        return pre(self)

    @torch.no_grad()
    def post(self: Tensor, gathered: Any, meta: Any, dtype: Any, *, out: Any = None):
        (data,) = gathered
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(data)
            return None
        full = data.to(dtype)
        return full, (data, full)

    with torch.device("meta"):
        model: Any = Net(Block(16), Block(16), nn.Linear(DIM, 4))
    wrap(get_system(system_name), model, reshard_after_forward=False)
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    for name, p in model.named_parameters():
        nn.init.uniform_(p, -0.5, 0.5)
        if "weight" in name and "norm" not in name:
            local = p._local_tensor
            local.fsdp_pre_all_gather = pre_of_five.__get__(local)
            local.fsdp_post_all_gather = post.__get__(local)
    return train(model)


def test_hooks_of_single_tensors_are_used(pool_of):
    ours = compare(pool_of(2), hooks_of_instances)
    weight = ours[0]["0 0.up.weight"]
    assert weight is not None and weight.dtype == torch.float32


# -- what the hooks see, and what is there when -------------------------------------


def seen() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))  # without names
    model = wrap(get_system("lowtide"), net(extended.Float8Weight), mesh=mesh, mp=BF16)
    extended.calls.clear()
    model(batch(0)).sum().backward()
    pre = [facts for name, facts in extended.calls if name == "pre"]
    post = [facts for name, facts in extended.calls if name == "post"]
    up, *_ = [facts for facts in pre if facts["to"] is model[0].up]
    return {
        "mesh": (up["mesh"].ndim, up["mesh"].size()),
        "outer": (tuple(up["size"]), tuple(up["stride"])),
        "gathers": len(pre),
        "made": sum(facts["out"] is None for facts in post),
        "again": [type(f["out"]).__name__ for f in post if f["out"] is not None],
        "dtypes": {facts["dtype"] for facts in post},
        "parameter": type(model[0].up.weight.data).__name__,
        "rows": type(model[0].up.weight.to_local()).__name__,
        "in state dict": type(model.state_dict()["0.up.weight"].to_local()).__name__,
    }


def test_hooks_get_the_mesh_of_shards_and_the_whole_parameters_size(pool_of):
    for facts in pool_of(4).run(seen):
        assert facts == {
            "mesh": (1, 2),
            "outer": ((16, DIM), (DIM, 1)),
            # Two matrices a block, in forward and in backward; the head stays.
            "gathers": 9,
            "made": 5,
            "again": ["Float8Full"] * 4,
            "dtypes": {torch.bfloat16},
            "parameter": "DTensor",
            "rows": "Float8Weight",
            "in state dict": "Float8Weight",
        }


def bytes_of(kind_name: str) -> dict[str, int]:
    """Of one matrix of 64 Ki elements, in bytes."""
    extended.calls.clear()  # which may hold another test's model
    gc.collect()
    layer: Any = nn.Linear(256, 256, bias=False)
    model = extended.extend(nn.Sequential(layer), getattr(extended, kind_name))
    model = get_system("lowtide").fully_shard(model, reshard_after_forward=True)
    state = unit_state(model)
    assert state is not None
    x = torch.randn(2, 256)
    model(x).sum().backward()
    inside: list[int] = []
    layer.register_forward_pre_hook(
        lambda *_: inside.append(
            lowtide.memory_report(model).categories["gathered"].live
        )
    )
    lowtide.memory_report(model, reset_peaks=True)
    state.groups.gather.reset_counters()
    model(x)
    report = lowtide.memory_report(model)
    return {
        "inside": inside[0],
        "wire": state.groups.gather.counters["all-gather"][1],
        "peak": report.categories["gathered"].peak,
        "planned": report.categories["gathered"].planned,
        "live": report.categories["gathered"].live,
    }


def test_float8_is_one_byte_a_parameter_on_the_wire_and_gathered(pool_of):
    numel, scales = 256 * 256, 256 * 4
    for facts in pool_of(2).run(bytes_of, "Float8Weight"):
        assert facts == {
            "inside": numel + scales,
            "wire": (numel + scales) // 2,
            "peak": numel + scales,
            "planned": numel + scales,
            "live": 0,
        }


def test_bytes_of_its_own_go_with_the_gathered_ones(pool_of):
    numel = 256 * 256
    for facts in pool_of(2).run(bytes_of, "Bf16Weight"):
        assert facts["peak"] == 2 * numel + 4 * numel
        assert facts["live"] == 0


def test_what_was_gathered_goes_first_where_it_may(pool_of):
    numel = 256 * 256
    for facts in pool_of(2).run(bytes_of, "Releasing"):
        assert facts == {
            "wire": 2 * numel // 2,
            "peak": 2 * numel + 4 * numel,
            "inside": 4 * numel,
            "planned": 2 * numel,
            "live": 0,
        }


class Watched(extended.Bf16Weight):
    def fsdp_post_all_gather(self, *args: Any, out: Any = None) -> Any:
        extended.calls.append(("post", {"traced": torch.compiler.is_compiling()}))
        return super().fsdp_post_all_gather(*args, out=out)


def compiled() -> list[bool]:
    model = net(Watched)
    for block in list(model)[:-1]:
        block.compile(backend="eager")
    wrap(get_system("lowtide"), model)
    extended.calls.clear()
    for step in range(2):
        model(batch(step)).sum().backward()
    return [facts["traced"] for _, facts in extended.calls]


def test_a_compiled_forward_does_not_trace_the_hooks(pool_of):
    for traced in pool_of(2).run(compiled):
        assert len(traced) == 18 and not any(traced)


def inference_first() -> Record:
    model = wrap(get_system("lowtide"), net(extended.Float8Weight))
    with torch.inference_mode():
        model(batch(0))
    model.reshard()
    return train(model)


def test_what_inference_made_can_be_trained(pool_of):
    pool = pool_of(2)
    for one, other in zip(
        pool.run(inference_first),
        pool.run(same_bits, "lowtide", FLOAT8, "defaults"),
        strict=True,
    ):
        assert_same_tensors(one, other, "after inference")


def after_a_failure() -> tuple[str, Record, Record]:
    model = wrap(get_system("lowtide"), net(extended.Float8Weight))
    post = extended.Float8Weight.fsdp_post_all_gather
    failures = iter([False, False, True])

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(failures, False):
            raise OSError("no kernel")
        return post(self, *args, **kwargs)

    extended.Float8Weight.fsdp_post_all_gather = fails  # type: ignore[method-assign]
    try:
        text = ""
        try:
            model(batch(0))
        except OSError as error:
            text = str(error)
        lowtide.abort_step(model)
        record = train(model)
    finally:
        extended.Float8Weight.fsdp_post_all_gather = post  # type: ignore[method-assign]
    return text, record, train(wrap(get_system("lowtide"), net(extended.Float8Weight)))


def test_training_goes_on_after_a_hook_raised(pool_of):
    for text, record, expected in pool_of(2).run(after_a_failure):
        assert text == "no kernel"
        assert_same_tensors(record, expected, "after a failure")


# -- refusals -----------------------------------------------------------------------


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without_hooks() -> str:
    model = wrap(get_system("lowtide"), net(extended.NoHooks))
    return error_of(lambda: model(batch(0)))


def test_a_subclass_that_nothing_gathers_is_refused_by_name(pool_of):
    for text in pool_of(2).run(without_hooks):
        assert text.startswith(
            "NotImplementedError: lowtide: 2.weight: expected a plain tensor, or a "
            "subclass that defines fsdp_pre_all_gather and fsdp_post_all_gather, got a "
            "NoHooks"
        )


class OneHook(extended.NoHooks):
    fsdp_pre_all_gather = extended.Float8Weight.fsdp_pre_all_gather


class ReleaseAlone(extended.NoHooks):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class Undecided(extended.Releasing):
    answer = 1


class OtherForm(extended.Float8Weight):
    def fsdp_pre_all_gather(self, mesh: Any, module: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class Changing(extended.Bf16Weight):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        extended.calls.append(("pre", {}))
        return self._data.to(
            torch.bfloat16 if len(extended.calls) < 2 else torch.float32
        ), None


class KeepsDtype(extended.Bf16Weight):
    def fsdp_post_all_gather(self, gathered: Any, *rest: Any, out: Any = None) -> Any:
        return gathered[0].float(), ()


def refused(kind_name: str, rows: int, **kwargs: Any) -> str:
    kind = globals().get(kind_name) or getattr(extended, kind_name)
    layer = extended.extend(nn.Sequential(nn.Linear(DIM, rows, bias=False)), kind)
    extended.calls.clear()

    def run() -> None:
        policy = get_system("lowtide").MixedPrecisionPolicy(**kwargs)
        model = get_system("lowtide").fully_shard(layer, mp_policy=policy)
        for _ in range(2):
            model(batch(0)).sum().backward()

    return error_of(run)


@pytest.mark.parametrize(
    ("kind", "rows", "policy", "expected"),
    [
        (
            "OneHook",
            4,
            {},
            "Linear.weight: expected fsdp_pre_all_gather and fsdp_",
        ),
        (
            "ReleaseAlone",
            4,
            {},
            "weight: expected fsdp_pre_all_gather and fsdp_post_all_gather where fsdp",
        ),
        (
            "Undecided",
            4,
            {},
            "0.weight: expected Undecided.fsdp_should_release_all_gather_outputs_"
            "after_post_all_gather to return a bool, got int. ",
        ),
        (
            "OtherForm",
            4,
            {},
            "weight: expected OtherForm.fsdp_pre_all_gather to take",
        ),
        ("Changing", 4, {}, "send the same every time, (2, 8) torch.bfloat16, got (2,"),
        ("KeepsDtype", 4, BF16, "to return a tensor of the param_dtype it is given"),
        ("Unpadded", 5, {}, "fsdp_pre_all_gather: expected as many elements on every"),
    ],
)
def test_what_a_hook_must_not_do_is_refused_on_every_rank(
    pool_of, kind, rows, policy, expected
):
    for text in pool_of(2).run(refused, kind, rows, **policy):
        assert expected in text


# -- ranks that differ --------------------------------------------------------------


def units_in_another_order(orders: list[tuple[int, ...]], steps_before: int) -> str:
    model = wrap(get_system("lowtide"), net(extended.Bf16Weight, blocks=3))
    model.order = (0, 1, 2)
    for step in range(steps_before):
        model(batch(step)).sum().backward()
        model.zero_grad()
    model.order = orders[dist.get_rank()]
    text = error_of(lambda: model(batch(7)).sum().backward())
    assert all(p.grad is None for p in model.parameters())
    model.order = (0, 1, 2)
    train(model, steps=1)  # the ranks go on together
    return text


@pytest.mark.parametrize("orders", [[(0, 1, 2), (2, 1, 0)], [(0,), (2,)]])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_units_in_another_order_are_named(pool_of, orders, steps_before):
    """Also in the forward in which each is gathered for the first time."""
    for text in pool_of(2).run(units_in_another_order, orders, steps_before):
        assert (
            "got the all-gather of unit '1' on rank 0 and the all-gather of unit '2' "
            "on rank 1, call " in text
        ), text


def gathered_before_the_first_forward(kind_name: str) -> str:
    model = wrap(get_system("lowtide"), net(getattr(extended, kind_name), hidden=15))

    def run() -> None:
        model[1].unshard()
        model(batch(0)).sum().backward()

    return error_of(run)


def test_a_unit_gathered_alone_compares_what_it_sends(pool_of):
    pool = pool_of(2)
    assert pool.run(gathered_before_the_first_forward, "Bf16Weight") == [""] * 2
    for text in pool.run(gathered_before_the_first_forward, "Unpadded"):
        assert "fsdp_pre_all_gather: expected as many elements on every rank, " in text
        assert "'Linear.weight' sending 64 elements torch.bfloat16 on rank 0" in text


def raises_on_one_rank() -> str:
    model = wrap(get_system("lowtide"), net(extended.Bf16Weight))
    if dist.get_rank() == 1:
        local = model[1].up.weight._local_tensor

        def fails(mesh: Any) -> Any:
            raise OSError("no kernel")

        local.fsdp_pre_all_gather = fails
    return error_of(lambda: model(batch(0)))


def test_a_hook_that_raises_on_one_rank_is_heard_of_on_all(pool_of):
    for text in pool_of(2).run(raises_on_one_rank):
        assert "parameter '1.up.weight' sending 64 elements torch.bfloat16" in text
        assert "OSError: no kernel on rank 1" in text


def raises_on_one_rank_later(hook: str) -> tuple[str, list[str]]:
    """In the gather of a second forward."""
    model = wrap(get_system("lowtide"), net(extended.Bf16Weight))
    model(batch(0)).sum().backward()
    model.zero_grad()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no kernel")

    if dist.get_rank() == 1:
        setattr(model[1].up.weight._local_tensor, hook, fails)
    try:
        model(batch(1)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}", getattr(error, "__notes__", [])
    return "", []


@pytest.mark.parametrize("hook", ["fsdp_pre_all_gather", "fsdp_post_all_gather"])
def test_a_hook_that_raises_later_names_its_parameter(hook):
    """Others wait for that rank's next call until their group gives up."""
    with RankPool(2, group_timeout=3.0) as pool:
        other, raising = pool.run(raises_on_one_rank_later, hook)
    assert raising[0] == "OSError: no kernel"
    assert raising[1] == [
        f"lowtide: 1.up.weight: expected Bf16Weight.{hook} to return on every rank, "
        "got this error (rank 1 of 2). The others wait for this rank's next collective "
        "until their group's timeout."
    ]
    assert other[0].startswith("RuntimeError: lowtide: ")
    assert "Timed out" in other[0]


def of_another_class_on_one_rank() -> str:
    odd = dist.get_rank() == 1
    kind = extended.Float8Weight if odd else extended.Bf16Weight
    return error_of(lambda: wrap(get_system("lowtide"), net(kind))(batch(0)))


def test_classes_that_differ_are_named(pool_of):
    for text in pool_of(2).run(of_another_class_on_one_rank):
        assert ", a Bf16Weight on rank 0 and parameter '2.weight'" in text
        assert ", a Float8Weight on rank 1" in text


class DrawsNumbers(extended.Bf16Weight):
    """As stochastic rounding does."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self._data + torch.randn_like(self._data),), None


def of_random_numbers(system_name: str) -> Record:
    torch.manual_seed(3)
    return train(wrap(get_system(system_name), net(DrawsNumbers)))


def test_hooks_draw_the_random_numbers_they_draw_with_fsdp2(pool_of):
    compare(pool_of(2), of_random_numbers)


def written_in_the_first_forward() -> tuple[Record, Record]:
    """Behind the hooks of all units, and before the first gather of this one's."""

    def output(in_forward: bool) -> Record:
        model = wrap(get_system("lowtide"), net(extended.Float8Weight, blocks=3))
        model.order = (0, 1, 2)
        weight = model[2].up.weight._local_tensor._data

        def write(*_: Any) -> None:
            weight.mul_(2)

        if in_forward:
            model[0].register_forward_hook(write)
        else:
            write()
        with torch.no_grad():
            return {"out": model(batch(0))}

    return output(True), output(False)


def test_a_write_between_hook_and_first_gather_counts(pool_of):
    for ours, expected in pool_of(2).run(written_in_the_first_forward):
        assert_same_tensors(ours, expected, "written")


def loaded_as_another_class() -> tuple[Record, Record]:
    """What ``load_state_dict`` assigns is gathered as it says itself."""
    model = wrap(get_system("lowtide"), net(extended.Float8Weight))
    train(model, steps=1)
    other = wrap(get_system("lowtide"), net(extended.Bf16Weight))
    state = {name: value.clone() for name, value in other.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.zero_grad()
    return train(model), train(other)


def test_a_checkpoint_of_another_class_trains(pool_of):
    for ours, expected in pool_of(2).run(loaded_as_another_class):
        assert_same_tensors(ours, expected, "loaded")


def local_parameters_of() -> str:
    model = wrap(get_system("lowtide"), net(extended.Float8Weight))
    return error_of(lambda: lowtide.local_parameters(model))


def test_local_parameters_are_of_plain_tensors(pool_of):
    for text in pool_of(2).run(local_parameters_of):
        assert "0.up.weight: expected a plain tensor, got a Float8Weight" in text
