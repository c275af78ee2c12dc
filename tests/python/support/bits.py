"""Bitwise comparison, with the first difference in the message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from support.training import Trace, gathered


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same_bits(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """NaN equals itself, -0.0 does not equal 0.0."""
    if actual is None or expected is None:
        return actual is expected
    return (
        actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and torch.equal(as_bytes(actual), as_bytes(expected))
    )


def difference(actual: torch.Tensor | None, expected: torch.Tensor | None) -> str:
    if actual is None or expected is None:
        return f"got {_kind(actual)}, expected {_kind(expected)}"
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"got {_kind(actual)}, expected {_kind(expected)}"
    size = actual.element_size()
    unequal = as_bytes(actual).ne(as_bytes(expected)).view(-1, size).any(1)
    at = int(unequal.nonzero()[0])
    got, want = actual.reshape(-1)[at].item(), expected.reshape(-1)[at].item()
    return (
        f"{int(unequal.sum())} of {unequal.numel()} elements differ, the first at "
        f"{at}: got {got!r}, expected {want!r}"
    )


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


def assert_same_tensors(
    actual: dict[str, torch.Tensor | None],
    expected: dict[str, torch.Tensor | None],
    what: str,
) -> None:
    assert list(actual) == list(expected), f"{what}: names or their order differ"
    for name in expected:
        if not same_bits(actual[name], expected[name]):
            text = difference(actual[name], expected[name])
            raise AssertionError(f"{what}, {name}: {text}")


def assert_same_traces(actual: Sequence[Trace], expected: Sequence[Trace]) -> None:
    """Two sharded runs, rank by rank: losses, gradients, parameters, norms."""
    for rank, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.losses == other.losses, f"losses on rank {rank}"
        assert one.norms == other.norms, f"gradient norms on rank {rank}"
        for what in ("grads", "params"):
            steps = zip(getattr(one, what), getattr(other, what), strict=True)
            for step, (a, b) in enumerate(steps):
                assert_same_tensors(a, b, f"{what} after step {step} on rank {rank}")


def assert_follows_rule(traces: Sequence[Trace], rule: Sequence[Trace]) -> None:
    """A sharded run against the full tensors of the single-process rule."""
    losses = [trace.losses for trace in traces]
    assert losses == [trace.losses for trace in rule], "losses"
    for what in ("grads", "params"):
        steps = gathered(traces, lambda trace, what=what: getattr(trace, what))
        expected = getattr(rule[0], what)
        for step, (a, b) in enumerate(zip(steps, expected, strict=True)):
            assert_same_tensors(a, b, f"{what} after step {step}")
