"""A listener hears of every allocation of the device, with the operator that asked."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lowtide import _phantom

PLAIN = {"cublas_workspace": 0}


def heard_during(program) -> list[tuple[int, int, int, str]]:
    heard: list[tuple[int, int, int, str]] = []
    _phantom.set_allocation_listener(lambda *call: heard.append(call))
    try:
        program()
    finally:
        _phantom.set_allocation_listener(None)
    return heard


def operators() -> list[object]:
    def program() -> None:
        x = torch.zeros(4, 1000, device="phantom", requires_grad=True)
        y = F.silu(x @ x.detach().T)
        y.sum().backward()

    return [(bytes, name) for _, bytes, _, name in heard_during(program)]


def test_bytes_asked_for_and_operators(phantom):
    assert phantom("meta", **PLAIN).run(operators) == [
        (16_000, "aten::zeros"),
        (64, "aten::mm"),
        (64, "aten::silu"),
        (4, "aten::sum"),
        (4, "aten::ones_like"),
        (64, "aten::silu_backward"),
        (16_000, "aten::mm"),
    ]


def addresses_and_streams() -> list[bool]:
    stream = torch.Stream("phantom")
    made = []

    def program() -> None:
        made.append(torch.empty(100, device="phantom"))
        with stream:
            made.append(torch.empty(100, device="phantom"))

    heard = heard_during(program)
    return [
        [address for address, *_ in heard] == [x.data_ptr() for x in made],
        [call[2] for call in heard] == [0, stream.stream_id],
        [call[3] for call in heard] == ["aten::empty", "aten::empty"],
    ]


def test_addresses_and_streams(phantom):
    assert phantom("meta", **PLAIN).run(addresses_and_streams) == [True] * 3


def a_listener_that_raises() -> list[object]:
    def refuse(*call: object) -> None:
        raise KeyError("not today")

    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    _phantom.set_allocation_listener(refuse)
    try:
        torch.empty(1 << 20, device="phantom")
        message = "nothing"
    except KeyError as error:
        message = str(error)
    finally:
        _phantom.set_allocation_listener(None)
    return [message, torch.accelerator.memory_allocated() - before]


def test_a_listener_that_raises_fails_the_allocation(phantom):
    message, leaked = phantom("meta", **PLAIN).run(a_listener_that_raises)
    assert (message, leaked) == ("'not today'", 0)


def after_the_listener() -> int:
    heard = heard_during(lambda: None)
    torch.empty(100, device="phantom")
    return len(heard)


def test_nothing_is_heard_afterwards(phantom):
    assert phantom("meta", **PLAIN).run(after_the_listener) == 0
