"""A full parameter that a program keeps beyond its unit's forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.systems import get_system

KEPT: dict[str, Callable[[Any], Any]] = {
    "itself": lambda p: p,
    "a view": lambda p: p[:2],
    "detached": lambda p: p.detach(),
    "data": lambda p: p.data.t(),
}

READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda kept: kept.sum(),
    "matmul": lambda kept: kept @ kept.t(),
    "clone": lambda kept: kept.clone(),
    "a row": lambda kept: kept[1].detach() + 1,
    "item": lambda kept: kept[0, 0].item(),
    "list": lambda kept: kept.tolist(),
    "numpy": lambda kept: kept.detach().numpy().sum(),
    "repr": repr,
    "address": lambda kept: kept.data_ptr(),
    "written": lambda kept: kept.detach().zero_(),
    "saved": lambda kept: torch.save(kept, "/dev/null"),
}


def built(keep: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    """A model of two units, and what a forward hook of the first keeps."""
    fully_shard = get_system("lowtide").fully_shard
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    kept: list[Any] = []
    model[0].register_forward_hook(lambda m, args, out: kept.append(keep(m.weight)))
    for unit in (model[0], model[2], model):
        fully_shard(unit)
    return model, kept


def error_of(fn: Callable[[], Any]) -> str:
    try:
        return f"no error, but {fn()}"
    except RuntimeError as error:
        return str(error).splitlines()[0]


def read_later(what: str) -> dict[str, str]:
    model, kept = built(KEPT[what])
    model(torch.ones(2, 4)).sum().backward()
    after_backward = {
        name: error_of(lambda r=r: r(kept[0])) for name, r in READS.items()
    }
    with torch.no_grad():
        model(torch.ones(2, 4))
    after_forward = {
        f"2 {name}": error_of(lambda r=r: r(kept[1])) for name, r in READS.items()
    }
    before = model[0].weight.full_tensor()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model[0].unshard()
    now = model[0].weight
    assert not torch.equal(now, before)
    assert torch.equal(kept[0], KEPT[what](now)), "as a view of any parameter"
    model[0].reshard()
    return after_backward | after_forward


@pytest.mark.parametrize("what", list(KEPT))
def test_every_read_of_it_names_the_unit(pool_of, what):
    for errors in pool_of(2).run(read_later, what):
        wrong = {
            name: text
            for name, text in errors.items()
            if text
            != "lowtide: 0.weight: expected a read while its unit '0' is gathered, got "
            "one when it had no bytes. Read it inside of the unit's forward or "
            "backward, or between unshard() and reshard(); what is kept for later is "
            "a clone()."
        }
        assert not wrong


def array_of(how: str) -> tuple[str, bool]:
    """The error, and whether training goes on without it."""
    arrays: dict[str, Callable[[Any], Any]] = {
        "itself": lambda p: p.detach().numpy(),
        "a view": lambda p: p.detach()[1].numpy(),
        "a copy": lambda p: p.detach().clone().numpy(),
    }
    model, kept = built(arrays[how])
    return error_of(lambda: model(torch.ones(2, 4)).sum().backward()), bool(kept)


@pytest.mark.parametrize("how", ["itself", "a view"])
def test_an_array_of_it_never_shows_freed_memory(pool_of, how):
    for error, kept in pool_of(2).run(array_of, how):
        assert kept
        assert error == (
            "lowtide: 0.weight: expected no NumPy array of it when its unit '0' gives "
            "its bytes back, got one that .numpy() made, which would show freed "
            "memory. Take the array of a copy: .clone().numpy()."
        )


def test_an_array_of_a_copy_is_fine(pool_of):
    for error, kept in pool_of(2).run(array_of, "a copy"):
        assert (error, kept) == ("no error, but None", True)


class FusedLinear(nn.Linear):
    """Says of itself what Megatron's and Transformer Engine's layers do: it writes its
    weight's gradient to ``main_grad``."""

    gradient_accumulation_fusion = True

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.main_grad
        return super().forward(x)


def main_gradient_later() -> str:
    model: Any = FusedLinear()
    get_system("lowtide").fully_shard(model, grads="fused")
    model(torch.ones(2, 64)).sum().backward()
    return error_of(lambda: model.seen.sum())


def test_a_kept_main_gradient_names_the_unit(pool_of):
    for error in pool_of(2).run(main_gradient_later):
        assert "main_grad: expected a read while its unit" in error
