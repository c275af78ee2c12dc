"""What belongs to one backward: made once in it, ended behind it, dropped with it."""

import gc
import weakref

import pytest
import torch

from lowtide._base.backward import PerBackward, in_backward


class Collected(list):
    """A list that can be referred to weakly."""


@torch.enable_grad()
def backward(*hooks):
    """Runs one in which each of ``hooks`` hears of another node."""
    y = torch.ones(2, requires_grad=True)
    for hook in hooks:
        y = y * 2
        y.register_hook(lambda gradient, hook=hook: (hook(), None)[1])
    y.sum().backward()


def test_one_value_a_backward_and_its_end_behind_all_nodes():
    ended = []
    values: PerBackward[Collected] = PerBackward()

    def note(name):
        values.get(Collected, lambda value: ended.append(list(value))).append(name)
        assert ended == expected  # not before the backward is over

    expected: list[list[str]] = []
    backward(lambda: note("first"), lambda: note("second"))
    assert ended == [["second", "first"]]
    expected = [["second", "first"]]
    backward(lambda: note("third"))
    assert ended == [["second", "first"], ["third"]]


def test_a_backward_that_raises_drops_its_value():
    ended = []
    values: PerBackward[Collected] = PerBackward()
    made = []

    def make():
        made.append(weakref.ref(value := Collected()))
        return value

    def fail():
        values.get(make, ended.append)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        backward(fail)
    gc.collect()
    assert ended == [] and made[0]() is None
    backward(lambda: values.get(make, ended.append))
    assert len(made) == 2 and len(ended) == 1


def test_a_backward_inside_another_has_its_own():
    ended = []
    values: PerBackward[Collected] = PerBackward()

    def note(name):
        values.get(Collected, lambda value: ended.append(list(value))).append(name)

    def outer():
        note("outer")
        backward(lambda: note("inner"))
        note("outer again")

    backward(outer)
    assert ended == [["inner"], ["outer", "outer again"]]


def test_an_error_at_the_end_is_the_backwards():
    values: PerBackward[Collected] = PerBackward()

    def at_end(value):
        raise ArithmeticError("at the end")

    with pytest.raises(ArithmeticError, match="at the end"):
        backward(lambda: values.get(Collected, at_end))


def test_in_backward():
    seen = []
    backward(lambda: seen.append(in_backward()))
    assert seen == [True] and not in_backward()
