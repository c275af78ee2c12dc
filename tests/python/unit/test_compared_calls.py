"""Calls of NCCL that ranks would wait in without end: ``dry.comparison.compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.phantom.dry.call_logs import Call, Communicator, Log, shown
from lowtide.phantom.dry.comparison import compare
from lowtide.phantom.dry.divergences import Difference, Divergence

WORLD = Communicator("0", (0, 1, 2, 3), purpose="default_pg")
SHARD, OTHER_SHARD = Communicator("1", (0, 1)), Communicator("2", (2, 3))
REDUCE = Communicator("3", (0, 1), purpose="lowtide_reduce")
REPLICATE, OTHER_REPLICATE = Communicator("4", (0, 2)), Communicator("5", (1, 3))


def gather(on: Communicator = SHARD, num_bytes: int = 64, **fields: object) -> Call:
    return Call(on, "all_gather", num_bytes, "bfloat16", **fields)  # type: ignore


def reduce(on: Communicator = REDUCE, num_bytes: int = 64) -> Call:
    return Call(on, "reduce_scatter", num_bytes, "float32", "avg")


def send(to: int, num_bytes: int = 8, *, on: Communicator = WORLD, group: int = 0):
    return Call(on, "send", num_bytes, "float32", peer=to, group=group)


def recv(of: int, num_bytes: int = 8, *, on: Communicator = WORLD, group: int = 0):
    return Call(on, "recv", num_bytes, "float32", peer=of, group=group)


def compared(*calls: Sequence[Call]) -> list[Divergence]:
    return compare([Log(rank, tuple(each)) for rank, each in enumerate(calls)])


def ends(divergence: Divergence) -> dict[int, tuple[int, Call] | None]:
    """{rank: number and call}"""
    return {
        side.rank: side.entry and (side.entry.number, side.entry.call)
        for side in divergence.sides
    }


def test_the_same_calls_agree():
    calls = [gather(), gather(num_bytes=128), reduce(), gather(WORLD)]
    assert compared(calls, calls, [gather(WORLD)], [gather(WORLD)]) == []


def test_where_a_call_was_made_does_not_matter():
    assert compared([gather(where="a.py:1")], [gather(where="b.py:2", group=7)]) == []


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "broadcast"},
        {"bytes": 65},
        {"type": "float16"},
        {"reduction": "sum"},
        {"peer": 1},
    ],
)
def test_a_call_that_differs_in(change):
    one = [reduce(), reduce(), reduce()]
    other = [reduce(), replace(reduce(), **change), reduce()]
    (found,) = compared(one, other)
    assert found.difference is Difference.CALLS
    assert ends(found) == {0: (2, one[1]), 1: (2, other[1])}


def test_a_call_that_a_rank_leaves_out_at_the_end():
    (found,) = compared([gather(), reduce()], [gather()])
    assert found.difference is Difference.CALLS
    assert ends(found) == {0: (2, reduce()), 1: None}


def test_a_communicator_that_a_rank_never_uses():
    (found,) = compared([gather()], [])
    assert ends(found) == {0: (1, gather()), 1: None}


def test_the_rank_that_differs_from_most_is_named():
    one, other = [gather(WORLD)], [gather(WORLD, 128)]
    (found,) = compared(one, one, other, one)
    assert set(ends(found)) == {0, 2}
    (found,) = compared(other, one, one, one)
    assert set(ends(found)) == {0, 1}


def test_ranks_that_did_not_run_are_not_waited_for():
    assert compare([Log(0, (gather(WORLD), reduce())), Log(3, (gather(WORLD),))]) == []


def test_a_rank_that_failed_might_have_gone_on():
    first = gather()
    calls = [Log(0, (first, reduce())), Log(1, (first,), complete=False)]
    assert compare(calls) == []
    calls[1] = Log(1, (gather(num_bytes=8),), complete=False)
    assert compare(calls) != []


def test_units_of_the_same_size_in_another_order():
    """No rank would wait; NCCL does not know what it sends."""
    calls = [gather(range=f"FSDP::all_gather (layers.{i})") for i in range(2)]
    (found,) = compared(calls, calls[::-1])
    assert found.difference is Difference.UNITS
    assert ends(found) == {0: (1, calls[0]), 1: (1, calls[1])}
    assert "each would take the other's bytes for its own" in str(found)
    calls = [replace(call, range=f"rank's own {i}") for i, call in enumerate(calls)]
    assert compared(calls, calls[::-1]) == []


def test_units_in_another_order_on_one_communicator():
    calls = [gather(num_bytes=64), gather(num_bytes=128)]
    (found,) = compared(calls, calls[::-1])
    assert ends(found) == {0: (1, calls[0]), 1: (1, calls[1])}


def test_the_same_calls_in_another_order_over_two_communicators():
    (found,) = compared([gather(), gather(), reduce()], [gather(), reduce(), gather()])
    assert found.difference is Difference.ORDER
    assert ends(found) == {0: (2, gather()), 1: (2, reduce())}


def test_an_order_that_only_three_ranks_together_can_not_keep():
    """0 waits for 1, which waits for 2, which waits for 0."""
    pairs = [Communicator(f"{a}{b}", (a, b)) for a, b in ((0, 1), (1, 2), (0, 2))]
    a, b, c = (gather(pair) for pair in pairs)
    (found,) = compared([a, c], [b, a], [c, b])
    assert set(ends(found)) == {0, 1, 2}
    assert compared([a, c], [a, b], [b, c]) == []


def test_a_mesh_of_two_dimensions():
    rows = {0: SHARD, 1: SHARD, 2: OTHER_SHARD, 3: OTHER_SHARD}
    columns = {0: REPLICATE, 1: OTHER_REPLICATE, 2: REPLICATE, 3: OTHER_REPLICATE}
    calls = [[gather(rows[r]), reduce(columns[r])] for r in range(4)]
    assert compared(*calls) == []
    calls[3].reverse()  # others wait for it and are waited for by nobody
    assert compared(*calls) == []
    calls[0].reverse()  # 0 waits for 2, for 3, for 1, for 0
    (found,) = compared(*calls)
    assert found.difference is Difference.ORDER
    assert set(ends(found)) == {0, 1, 2, 3}


def test_of_several_differences_the_first():
    one = [gather(), reduce(), gather(num_bytes=128)]
    other = [gather(), reduce(num_bytes=8), gather(num_bytes=256)]
    (found,) = compared(one, other)
    assert ends(found) == {0: (2, one[1]), 1: (2, other[1])}


def test_ranks_apart_from_each_other_have_differences_of_their_own():
    calls = [gather(SHARD)], [], [gather(OTHER_SHARD)] * 2, [gather(OTHER_SHARD)]
    first, second = compared(*calls)
    assert ends(first) == {0: (1, gather(SHARD)), 1: None}
    assert ends(second) == {2: (2, gather(OTHER_SHARD)), 3: None}


def test_what_a_rank_does_instead_is_shown():
    """It is on another communicator."""
    one = [gather(), reduce(), gather(WORLD)]
    (found,) = compared(one, [gather(), gather(WORLD)])
    assert found.difference is Difference.CALLS
    assert ends(found) == {0: (2, reduce()), 1: (2, gather(WORLD))}


def test_sends_meet_receives_of_their_bytes():
    assert compared([send(1), recv(1, 16)], [recv(0), send(0, 16)]) == []
    (found,) = compared([send(1, 8)], [recv(0, 16)])
    assert ends(found) == {0: (1, send(1, 8)), 1: (1, recv(0, 16))}


def test_a_receive_is_of_the_rank_it_names():
    """1 hears 2 before 0."""
    calls = [send(1, 8)], [recv(2, 16), recv(0, 8)], [send(1, 16)]
    assert compared(*calls) == []


def test_sends_of_one_group_meet_in_any_order():
    one = [send(1, group=1), recv(1, group=1)]
    assert compared(one, [send(0, group=4), recv(0, group=4)]) == []
    assert compared(one, [recv(0, group=4), send(0, group=4)]) == []


def test_two_ranks_that_both_send_first():
    (found,) = compared([send(1), recv(1)], [send(0), recv(0)])
    assert ends(found) == {0: (1, send(1)), 1: (1, send(0))}


def test_a_ring_of_sends_must_be_a_group():
    def ring(*, group: int) -> list[list[Call]]:
        return [
            [send((r + 1) % 4, group=group), recv((r - 1) % 4, group=group)]
            for r in range(4)
        ]

    assert compared(*ring(group=1)) == []
    (found,) = compared(*ring(group=0))
    assert set(ends(found)) == {0, 1, 2, 3}


def test_a_receive_that_nobody_sends_to():
    (found,) = compared([send(1), gather(WORLD)], [recv(0), recv(0), gather(WORLD)])
    assert ends(found) == {0: (2, gather(WORLD)), 1: (2, recv(0))}
    (found,) = compared([send(1)], [recv(0), recv(0)])
    assert ends(found) == {0: None, 1: (2, recv(0))}


def test_the_other_end_of_ranks_that_did_not_run():
    assert compare([Log(0, (send(1), recv(3))), Log(2, (recv(3),))]) == []


def test_a_rank_sends_to_itself():
    assert compared([send(0, group=1), recv(0, group=1)], []) == []


def test_shares_of_an_all_to_all_depend_on_data_that_does_not_travel():
    one, other = (
        [replace(call, operation="all_to_allv") for call in calls]
        for calls in (
            [send(1, 8, group=1), recv(1, 8, group=1)],
            [send(0, 24, group=1), recv(0, 24, group=1)],
        )
    )
    assert compared(one, other) == []
    assert compared(one, other[:1]) != []


def test_what_is_said():
    one = [
        Call(SHARD, "all_gather", 33088, "bfloat16", where="train.py:24"),
        Call(
            *(REDUCE, "reduce_scatter", 132352, "float32", "avg"),
            range="lowtide::post_backward (layers.1)",
            node="AddBackward0",
            where="train.py:24",
        ),
    ]
    (found,) = compared(one, one[:1])
    assert str(found) == (
        "lowtide: ranks 0 and 1: expected the same calls of NCCL in the same order, "
        "got others:\n"
        "  rank 0, call 2: reduce_scatter of 132,352 B float32, avg, on lowtide_reduce "
        "of ranks 0 and 1, in lowtide::post_backward (layers.1), in backward "
        "(AddBackward0), at train.py:24\n"
        "  rank 1: nothing more\n"
        "before that:\n"
        "  each: all_gather of 33,088 B bfloat16 on the group of ranks 0 and 1, at "
        "train.py:24\n"
        "On GPUs they would wait for each other without end. Let every rank decide "
        "alike about these calls and their order."
    )
    (found,) = compared([gather(), reduce()], [reduce(), gather()])
    assert ", got another one over their communicators:\n" in str(found)
    assert "before that" not in str(found)
    (found,) = compared([gather(), reduce(), gather(WORLD)], [gather(), gather(WORLD)])
    assert "before that:\n  each: all_gather" in str(found)
    (found,) = compared([gather(), reduce(), gather(WORLD)], [gather(), reduce()])
    assert "before that:\n  each: all_gather" in str(found)


def test_ranks_are_said_in_short():
    assert shown((3,)) == "rank 3"
    assert shown((0, 4)) == "ranks 0 and 4"
    assert shown((4, 5, 6)) == "ranks 4-6"
    assert shown((1, 5, 9, 13)) == "ranks 1, 5, ..., 13"
    assert shown((0, 1, 5)) == "ranks 0, 1, 5"
    assert shown((2, 1, 0)) == "ranks 2, 1, 0"


# -- whatever the calls are -----------------------------------------------------------

COMMUNICATORS = (
    *(WORLD, SHARD, OTHER_SHARD, REDUCE, REPLICATE, OTHER_REPLICATE),
    Communicator("6", (0, 1, 3)),
)
PROGRAM = st.lists(
    st.builds(gather, st.sampled_from(COMMUNICATORS), st.integers(1, 4)), max_size=30
)


def logs_of(program: Sequence[Call]) -> list[list[Call]]:
    """What each rank sees of it."""
    return [
        [call for call in program if rank in call.communicator.ranks]
        for rank in range(4)
    ]


@given(PROGRAM)
def test_ranks_that_run_one_program_agree(program):
    assert compared(*logs_of(program)) == []


@given(PROGRAM, st.data())
def test_calls_of_disjoint_communicators_may_change_places(program, data):
    """Ranks that are in one of them do not see the other."""
    for _ in range(3):
        if len(program) < 2:
            return
        place = data.draw(st.integers(0, len(program) - 2))
        one, other = program[place : place + 2]
        if not set(one.communicator.ranks) & set(other.communicator.ranks):
            program[place : place + 2] = [other, one]
    assert compared(*logs_of(program)) == []


@given(PROGRAM, st.data())
def test_two_calls_that_change_places_on_one_rank_are_found(program, data):
    """They are next to each other there; another rank sees both, not as the same."""
    logs = logs_of(program)
    swaps = [
        (rank, place)
        for rank, calls in enumerate(logs)
        for place, (one, other) in enumerate(zip(calls, calls[1:], strict=False))
        if one != other
        and len(set(one.communicator.ranks) & set(other.communicator.ranks)) > 1
    ]
    if not swaps:
        return
    rank, place = data.draw(st.sampled_from(swaps))
    calls = logs[rank]
    calls[place], calls[place + 1] = calls[place + 1], calls[place]
    assert rank in {side.rank for each in compared(*logs) for side in each.sides}


@given(PROGRAM, st.data())
def test_a_call_that_one_rank_leaves_out_is_found(program, data):
    logs = logs_of(program)
    rank = data.draw(st.integers(0, 3))
    if not logs[rank]:
        return
    logs[rank].pop(data.draw(st.integers(0, len(logs[rank]) - 1)))
    assert compared(*logs)
