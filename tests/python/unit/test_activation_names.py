"""Names: given by tag, "input" or patterns; what is stored under them is not computed
again, and a name that comes to nothing raises."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)
from torch.utils.flop_counter import FlopCounterMode

from lowtide import ActivationPolicy, checkpoint, tag
from lowtide._activation.regions import region_state
from support.blocks import (
    DIM,
    HIDDEN,
    HIDDEN_BYTES,
    RESIDUAL_BYTES,
    ROWS,
    Mlp,
    assert_same_bits,
    rows,
    stack,
    step,
)

LAYERS = 4
UP_FLOPS = 2 * ROWS * DIM * HIDDEN  # one of a block's two products


def policies(model: nn.Sequential, name: str) -> dict[str, int]:
    """The figures of ``name``, summed over the model's regions."""
    total: dict[str, int] = {}
    for block in model:
        for key, value in region_state(block).region.figures().get(name, {}).items():
            if key != "skipped":
                total[key] = total.get(key, 0) + value
    return total


def reasons(model: nn.Sequential, name: str) -> set[str]:
    found: set[str] = set()
    for block in model:
        figures = region_state(block).region.figures()
        found |= set(figures.get(name, {}).get("skipped", {}))
    return found


def wrapped(**policy) -> nn.Sequential:
    return stack(LAYERS, wrap=lambda m: checkpoint(m, ActivationPolicy(**policy)))


ALL = [
    {"offload": ["residual"]},
    {"save": ["residual"]},
    {"save": ["hidden"]},
    {"offload": ["hidden"]},
    {"offload": ["residual", "hidden"]},
    {"offload": ["residual"], "save": ["hidden"]},
    {"offload": ["input", "hidden"], "prefetch": 0},
    {"offload": ["input"], "prefetch": 3, "keep_last": 1},
    {"offload": ["up"], "recompute": ["residual"]},
    {"offload": ["layers.*.norm"]},
]


@pytest.mark.parametrize("policy", ALL, ids=str)
def test_same_bits_for_every_policy(policy: dict) -> None:
    plain = stack(LAYERS, dropout=0.1)
    ours = stack(
        LAYERS,
        dropout=0.1,
        wrap=lambda m: checkpoint(m, ActivationPolicy(**policy)),
    )
    for seed in range(3):
        assert_same_bits(step(ours, rows(seed)), step(plain, rows(seed)))


def test_figures_are_exact():
    model = wrapped(offload=["residual"], save=["hidden"])
    for _ in range(2):
        step(model)
    assert policies(model, "residual") == {
        "matched": 2 * LAYERS,
        "moved": 2 * LAYERS,
        "moved_bytes": 2 * LAYERS * RESIDUAL_BYTES,
        "kept": 0,
        "kept_bytes": 0,
        "shared": 0,
        "recomputed": 0,
    }
    assert policies(model, "hidden") == {
        "matched": 2 * LAYERS,
        "moved": 0,
        "moved_bytes": 0,
        "kept": 2 * LAYERS,
        "kept_bytes": 2 * LAYERS * HIDDEN_BYTES,
        "shared": 0,
        "recomputed": 0,
    }


def flops(model: nn.Module) -> int:
    step(model)  # the first forward also learns where the names are
    with FlopCounterMode(display=False) as counter:
        step(model)
    return counter.get_total_flops()


@pytest.mark.parametrize("treatment", ["save", "offload"])
def test_what_produced_a_stored_value_is_not_run_again(treatment: str) -> None:
    everything = flops(wrapped())
    assert flops(wrapped(**{treatment: ["hidden"]})) == everything - LAYERS * UP_FLOPS
    assert flops(wrapped(**{treatment: ["up"]})) == everything - LAYERS * UP_FLOPS
    assert flops(wrapped(offload=["residual"])) == everything


def test_a_name_on_an_output_is_the_next_blocks_argument():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return tag(x + self.down(F.gelu(self.up(x))), "residual")

    def build(wrap) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(*[wrap(Block()) for _ in range(LAYERS)])

    policy = ActivationPolicy(offload=["residual"])
    plain, ours = build(lambda m: m), build(lambda m: checkpoint(m, policy))
    for _ in range(2):
        assert_same_bits(step(ours), step(plain))
    # The first block's argument carries no name; the last one's output is nobody's.
    assert policies(ours, "residual")["moved"] == 2 * (LAYERS - 1)
    assert reasons(ours, "residual") == {
        "nothing that is computed again comes after it, so storing it would save "
        "nothing; name a value before it"
    }


def test_a_name_given_between_blocks():
    class Model(nn.Module):
        def __init__(self, wrap) -> None:
            super().__init__()
            self.layers = nn.ModuleList([wrap(Mlp()) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(tag(x, "between"))
            return x

    torch.manual_seed(1)
    plain = Model(lambda m: m)
    torch.manual_seed(1)
    ours = Model(lambda m: checkpoint(m, ActivationPolicy(offload=["between"])))
    assert_same_bits(step(ours), step(plain))
    assert policies(ours.layers, "between")["moved"] == 3


def test_bytes_under_two_names_are_copied_once():
    model = wrapped(offload=["residual", "input"])
    step(model)
    names = [policies(model, name) for name in ("residual", "input")]
    assert sum(n["moved_bytes"] for n in names) == LAYERS * RESIDUAL_BYTES
    assert sum(n["shared"] for n in names) == LAYERS


def test_an_interior_value_under_two_names_is_stored_once():
    model = wrapped(offload=["hidden", "up"])
    assert_same_bits(step(model), step(stack(LAYERS)))
    names = [policies(model, name) for name in ("hidden", "up")]
    assert sum(n["moved_bytes"] for n in names) == LAYERS * HIDDEN_BYTES
    assert sum(n["shared"] for n in names) == LAYERS


@pytest.mark.parametrize(
    ("names", "policy"),
    [
        ("'residual' and 'input'", {"save": ["residual"], "offload": ["input"]}),
        ("'up' and 'hidden'", {"save": ["hidden"], "offload": ["up"]}),
    ],
    ids=str,
)
def test_two_treatments_for_the_same_bytes_raise(names: str, policy: dict) -> None:
    with pytest.raises(RuntimeError) as error:
        step(wrapped(**policy))
    first, second = sorted(names.split(" and "))
    text = str(error.value)
    assert text.startswith("lowtide: checkpoint(Mlp): expected one treatment for a")
    assert first in text and second in text
    assert text.endswith(
        "for the same bytes, in different lists. Put both into one list of the "
        "ActivationPolicy, or remove one."
    )


def test_parameters_and_their_views_never_move():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(DIM))
            self.inner = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            tag(self.weight, "weight"), tag(self.weight[2:], "weight")
            return self.inner(x * w.sin() * self.weight)

    module = checkpoint(Odd(), ActivationPolicy(offload=["weight", "input"]))
    outside = nn.Parameter(torch.ones(DIM, DIM))
    x = rows().requires_grad_() * 1.0
    with pytest.raises(ValueError, match="got 0 bytes: 2 x a parameter"):
        module(x, outside[0]).sum().backward()
    figures = region_state(module).region.figures()
    assert figures["weight"]["moved"] == 0 and figures["input"]["moved"] == 1
    assert figures["input"]["skipped"] == {"a parameter (a leaf), or a view of one": 1}


def test_buffers_and_frozen_parameters_never_move():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(2, DIM))
            self.frozen = nn.Parameter(torch.ones(DIM), requires_grad=False)
            self.inner = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            tag(self.scale[1], "state"), tag(self.frozen, "state")
            return self.inner(x * self.scale[1] * self.frozen)

    module = checkpoint(Odd(), ActivationPolicy(offload=["state"]))
    with pytest.raises(ValueError, match="got 0 bytes: 2 x a parameter or buffer"):
        module(rows().requires_grad_() * 1.0).sum().backward()


def test_an_argument_without_gradient_is_not_moved_as_input():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.inner(x * mask).sin()

    module = checkpoint(Masked(), ActivationPolicy(offload=["input"]))
    module(rows().requires_grad_() * 1.0, torch.ones(ROWS, DIM)).sum().backward()
    figures = region_state(module).region.figures()["input"]
    assert figures["moved"] == 1
    assert figures["skipped"] == {"does not require grad: other regions share it": 1}


def test_min_bytes():
    policy = {"offload": ["residual", "hidden"], "min_bytes": RESIDUAL_BYTES + 1}
    model = wrapped(**policy)
    with pytest.raises(ValueError, match="lowtide: ") as error:
        step(model)
    assert str(error.value) == (
        "lowtide: ActivationPolicy.offload: expected 'residual' to offload something "
        f"in Mlp, got 0 bytes: 4 x smaller than min_bytes={RESIDUAL_BYTES + 1}. Remove "
        "the name, or change the policy."
    )
    assert policies(model, "hidden")["moved"] == LAYERS


def operators_of(run) -> list[str]:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with Names():
        run()
    return names


def test_attention_returns_several_values_and_is_not_run_again():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(1, ROWS, 2, 3 * DIM // 2).split(DIM // 2, -1)
            y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
            y = tag(y, "attention").transpose(1, 2).reshape(ROWS, DIM)
            return x + self.out(F.dropout(y, 0.5))

    def build(**policy):
        torch.manual_seed(1)
        module = Attention()
        if policy:
            checkpoint(module, ActivationPolicy(**policy))
        return nn.Sequential(module)

    plain = build()
    for treatment in ("save", "offload"):
        ours = build(**{treatment: ["attention"]})
        for _ in range(2):
            assert_same_bits(step(ours), step(plain))
    ran = operators_of(lambda: step(ours))
    assert sum("scaled_dot_product" in name for name in ran) == 2  # and its backward
    again = operators_of(lambda: step(build(offload=["input"])))
    assert sum("scaled_dot_product" in name for name in again) == 3


@pytest.mark.parametrize("treatment", ["save", "offload"])
def test_random_numbers_behind_a_skipped_operator_are_the_same(treatment: str) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

        def forward(self, x: Tensor) -> Tensor:
            noise = tag(torch.rand_like(self.up(x)), "noise")
            return x + F.dropout(self.down(self.up(x) * noise).sin(), 0.5)

    torch.manual_seed(1)
    plain = nn.Sequential(Noisy())
    torch.manual_seed(1)
    policy = ActivationPolicy(**{treatment: ["noise"]})
    ours = nn.Sequential(checkpoint(Noisy(), policy))
    for _ in range(2):
        assert_same_bits(step(ours), step(plain))
    assert policies(ours, "noise")["matched"] == 2


def test_tag_returns_the_tensor_itself():
    x = rows().requires_grad_()
    assert tag(x, "x") is x
    with torch.no_grad():
        assert tag(x, "x") is x
    with torch.inference_mode():
        assert tag(x, "x") is x


def test_a_region_whose_names_are_all_arguments_sees_no_operator():
    seen = []
    model = wrapped(offload=["residual"])
    step(model)
    model[0].up.register_forward_hook(
        lambda *_: seen.append(len(_get_current_dispatch_mode_stack()))
    )
    step(model)
    assert seen == [0, 0]


def test_a_check_happens_once():
    model = wrapped(offload=["residal"])
    with pytest.raises(ValueError, match="residal"):
        step(model)
    step(model)
