"""Training steps on CUDA without a GPU: when the host waits, whether a CUDA graph can
capture them, what NCCL is asked for. Over the dry driver: torch's
operators, allocator, graphs and process groups are the real ones; kernels and NCCL do
nothing, and the driver refuses what CUDA refuses."""

from __future__ import annotations

import collections
import json

import pytest

from lowtide._torch_version import VERSION
from lowtide.phantom.dry.driver import Call
from support import (
    backward_streams_dry_run,
    capture_dry_run,
    gradient_streams_dry_run,
    nccl_dry_run,
    side_streams_dry_run,
    steady_step_dry_run,
)
from support.cuda_steps import KINDS
from support.dry_cuda import run_dry

MEMORY = 8 << 30
READ_BACK, FROM_HOST = "read back", "inputs from the host"
DROPOUT, UNUSED = "checkpointed, dropout", "unused parameters"

STEADY = tuple(kind for kind in KINDS if kind not in (READ_BACK, FROM_HOST, UNUSED))
# What a rank left out it was told of in the steps before.
CAPTURED = (*(kind for kind in STEADY if kind != DROPOUT), UNUSED)


@pytest.mark.parametrize("events", ["immediate", "at_sync"])
@pytest.mark.parametrize("group", ["fake", "nccl"])
def test_the_host_never_waits_in_a_steady_step(group: str, events: str) -> None:
    program = [steady_step_dry_run.__file__, group]
    waits = json.loads(run_dry(program, memory=MEMORY, events=events))
    for kind in STEADY:
        assert waits[kind][1:] == [0] * 5, kind
    assert waits[READ_BACK][1:] == [1] * 5  # the loss's item() is seen
    # Both inputs have been read when the model returns, as with FSDP2.
    assert waits[FROM_HOST][1:] == [2] * 5
    # At the end of the backward, for each of two units; hosts that compare what ranks
    # did tell each other.
    assert waits[UNUSED][1:] == [0 if group == "nccl" else 2] * 5


def test_small_gradients_of_a_unit_are_copied_or_added_in_one_launch() -> None:
    program = [steady_step_dry_run.__file__, "small"]
    found = json.loads(run_dry(program, memory=MEMORY, events="immediate"))
    for few_and_many in found.values():
        assert few_and_many["2"] == few_and_many["8"]
    # The third of three backwards: added to what the first two left.
    assert found["False"]["8"] == 1


def capture(*kinds: str) -> dict[str, dict[str, int | str]]:
    program = [capture_dry_run.__file__, *kinds]
    return json.loads(run_dry(program, memory=MEMORY, events="immediate"))


@pytest.fixture(scope="module")
def captured() -> dict[str, dict[str, int | str]]:
    return capture(*CAPTURED)


@pytest.mark.parametrize("kind", CAPTURED)
def test_a_graph_captures_a_step(captured, kind) -> None:
    """Forward, backward, clipping and the optimizer, with eager steps in between: every
    stream joins and is joined, no wait reaches out of the graph, nothing runs beside
    it, and where it has parameters and gradients nothing else comes to lie."""
    assert captured[kind] == {"graphs": 2, "stray": 0, "taken": 0}


def test_gradients_stay_where_a_graph_of_forward_and_backward_writes_them() -> None:
    """Which an optimizer beside it reads, with evaluations in between."""
    program = [capture_dry_run.__file__, "gradients"]
    assert json.loads(run_dry(program, memory=MEMORY, events="immediate")) == [0, 0]


def test_gradients_arrive_on_the_stream_of_their_forward() -> None:
    program = [gradient_streams_dry_run.__file__]
    printed = run_dry(program, memory=MEMORY, events="immediate")
    assert json.loads(printed) == {"exact": [True] * 6, "fused": [True] * 6}


def test_a_backward_on_another_stream_leaves_nothing_behind_on_its_forwards() -> None:
    """What comes next on the forward's takes the bytes of what left."""
    program = [backward_streams_dry_run.__file__]
    printed = run_dry(program, memory=MEMORY, events="immediate")
    assert json.loads(printed) == dict.fromkeys(KINDS, [0, 0])


@pytest.fixture(scope="module")
def side_streams() -> dict[str, str]:
    program = [side_streams_dry_run.__file__]
    return json.loads(run_dry(program, memory=MEMORY, events="immediate"))


def test_a_fused_weight_on_another_stream_is_left_to_autograd(
    side_streams: dict[str, str],
) -> None:
    report = json.loads(side_streams["layers"])
    assert report["fused"] == ["here.weight", "aside.weight"]
    assert report["exact"] == {
        "aside.weight": "on another stream than the forward began on (2 uses)"
    }


def test_a_compiled_fused_weight_on_another_stream_is_refused(
    side_streams: dict[str, str],
) -> None:
    assert side_streams["compiled"] == (
        'lowtide: torch.compile of a layer with grads="fused": expected a weight '
        "gradient that only the optimizer reads, got a call on another stream than the "
        'model\'s forward began on. Shard the module with grads="exact", or do not '
        "compile it."
    )


def test_a_unit_on_another_stream_is_refused(side_streams: dict[str, str]) -> None:
    assert side_streams["units"] == (
        "lowtide: unit 'aside': expected its forward on the stream that the forward of "
        "'Forked' began on, got another stream. Enter the stream around the whole "
        "forward, its loss included, or shard the module that switches streams instead "
        "of those inside it: a unit's own forward may use other streams if it waits "
        "for them before it returns."
    )


def test_the_loss_of_a_streamed_head_on_another_stream_is_refused(
    side_streams: dict[str, str],
) -> None:
    """The stream of the forward before it is accepted; another one, though it waits,
    is not: rows of the next gathers would come from its memory."""
    assert side_streams["head"].startswith(
        "side: lowtide: unit 'head': expected its rows to be read on the stream that "
        "the forward of 'Headed' began on, got another stream. "
    )


def test_what_a_graph_can_not_capture_is_refused() -> None:
    waits = capture(READ_BACK)[READ_BACK]["refused"]
    assert waits == "CUDA error: operation not permitted when stream is capturing"
    assert capture(DROPOUT)[DROPOUT]["refused"] == (
        "lowtide: checkpoint: expected no random numbers in a region that a CUDA graph "
        "captures, got operators that drew some. Computing it again takes the same "
        "numbers, and torch does not let a generator be set back during a capture: set "
        "dropout to 0 there, or capture modules that are not checkpointed."
    )


Calls = dict[str, list[Call]]


@pytest.fixture(scope="module")
def nccl() -> Calls:
    program = [nccl_dry_run.__file__, "calls"]
    found = json.loads(run_dry(program, memory=MEMORY, events="immediate"))
    return {
        setting: [Call(*call) for call in calls] for setting, calls in found.items()
    }


def test_a_gather_is_one_group_of_calls(nccl: Calls) -> None:
    gathers = [call for call in nccl["separate"] if call.kind == "all_gather"]
    # Two layers in forward and in backward, the root once. One call needs no group.
    assert len(gathers) == 5
    assert {call.depth for call in gathers} == {1 if VERSION < (2, 15) else 0}


def test_gradients_are_averaged_by_nccl(nccl: Calls) -> None:
    for calls in nccl.values():
        reductions = {call.reduction for call in calls if call.kind == "reduce_scatter"}
        assert reductions == {"avg"}


def test_nccl_runs_on_streams_of_high_priority(nccl: Calls) -> None:
    length = len(nccl["separate"])  # of a step
    for setting in ("separate", "shared", "registered"):
        step = nccl[setting][-length:]
        for what in ("all_gather", "reduce_scatter"):
            assert {call.priority for call in step if call.kind == what} == {-1}


def test_parameters_are_shown_behind_their_gather() -> None:
    """Also those of comm objects, which run on the stream they are called from."""
    program = [nccl_dry_run.__file__, "unseen"]
    printed = run_dry(program, memory=MEMORY, events="immediate")
    units = [0, 0, 0]
    settings = ("separate", "registered", "own", "symmetric")
    assert json.loads(printed) == dict.fromkeys(settings, units)


def test_buffers_in_symmetric_memory_are_registered_once() -> None:
    program = [nccl_dry_run.__file__, "symmetric"]
    found = json.loads(run_dry(program, memory=MEMORY, events="immediate"))
    windows = {}
    for setting, steps in found.items():
        first, second, third = ([Call(*call) for call in calls] for calls in steps)
        kinds = collections.Counter(call.kind for call in second)
        assert kinds == collections.Counter(call.kind for call in third)
        assert kinds["all_gather"] == 5 and "register_window" not in kinds
        reductions = {c.reduction for c in second if c.kind == "reduce_scatter"}
        sums = setting == nccl_dry_run.sum_in_symmetric_memory.__name__
        assert reductions == {"sum" if sums else "avg"}
        windows[sums] = sum(call.kind == "register_window" for call in first)
    assert 0 < windows[False] < windows[True]


def test_a_model_deleted_after_a_failure_is_behind_what_it_started() -> None:
    program = [nccl_dry_run.__file__, "deleted"]
    printed = run_dry(program, memory=MEMORY, events="immediate")
    assert json.loads(printed) == {
        # torch 2.15 asks for events, and these are done at once.
        "forward": [1 if VERSION < (2, 15) else 0, 0],
        "backward": [1, 0],
        # The gather it issued before it raised has no owner.
        "comm object": [0, 0],
    }


def communicators(calls: list[Call], what: str) -> set[int]:
    return {call.communicator for call in calls if call.kind == what}


def test_reductions_have_a_communicator_of_their_own_or_share_it(nccl: Calls) -> None:
    separate, shared = (nccl[name] for name in ("separate", "shared"))
    gather, reduce = (
        communicators(separate, what) for what in ("all_gather", "reduce_scatter")
    )
    assert (len(gather), len(reduce)) == (1, 1) and gather != reduce
    (one,) = communicators(shared, "all_gather")
    assert communicators(shared, "reduce_scatter") == {one}
    # The same collectives in the same order.
    assert [call[:4] for call in shared] == [call[:4] for call in separate]


def test_a_unit_is_summed_over_replicas_by_one_call_on_a_stream_of_its_own(
    nccl: Calls,
) -> None:
    """Of high priority, and on a communicator of its own: beside gathers and
    reductions. Norms are summed over the shards, too."""
    calls = nccl["replicated"]
    gathers, reductions = (
        [call for call in calls if call.kind == what]
        for what in ("all_gather", "reduce_scatter")
    )
    (shards,) = {call.communicator for call in gathers}
    sums = [
        call
        for call in calls
        if call.kind == "all_reduce" and call.communicator != shards
    ]
    assert len(sums) == 3  # two layers and the root
    assert {call.reduction for call in sums} == {"avg"}
    assert {call.priority for call in (*gathers, *reductions, *sums)} == {-1}
    ways = [
        {(call.communicator, call.stream) for call in part}
        for part in (gathers, reductions, sums)
    ]
    assert [len(way) for way in ways] == [1, 1, 1]
    communicators, streams = zip(*(way.pop() for way in ways), strict=True)
    assert len(set(communicators)) == len(set(streams)) == 3


def test_the_second_communicator_is_no_split_and_has_the_first_ones_settings(
    nccl: Calls,
) -> None:
    """A split would wait for ranks of the job that are not on the mesh."""
    made = [call for call in nccl["from the start"] if call.kind in ("init", "split")]
    assert [(call.kind, call.most_ctas) for call in made] == [
        ("init", nccl_dry_run.MOST_CTAS)
    ] * 2


MADE = {"init", "split"}
COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}
# Of how many communicators they are in a step, by the mesh.
USED = {
    "shards": {"all_gather": 1, "reduce_scatter": 1},
    # Sums over replicas; norms are summed over both.
    "replicas": {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2},
    # Backward gathers what has stayed within two ranks.
    "parts": {"all_gather": 2, "reduce_scatter": 1},
}


@pytest.mark.parametrize("backend", nccl_dry_run.BACKENDS)
def test_communicators_are_made_when_the_model_is_sharded(backend: str) -> None:
    """Whatever torch's group does by itself: no collective makes one, least of all a
    reduction's on autograd's thread."""
    program = [nccl_dry_run.__file__, "unbound", backend]
    meshes = json.loads(run_dry(program, memory=MEMORY))
    for mesh, used in USED.items():
        sharded, first, second = (
            [Call(*call) for call in meshes[mesh][part]]
            for part in ("sharded", "first", "second")
        )
        made = set().union(*(communicators(sharded, what) for what in MADE))
        assert {call.kind for call in sharded}.isdisjoint(COLLECTIVES), mesh
        assert {call.kind for call in first + second}.isdisjoint(MADE), mesh
        for what in COLLECTIVES:
            assert communicators(first + second, what) <= made, (mesh, what)
        assert {what: len(communicators(second, what)) for what in used} == used, mesh


def test_buffers_may_be_nccls_own_and_registered(nccl: Calls) -> None:
    calls = nccl["registered"]
    registered = communicators(calls, "register")
    for what in ("all_gather", "reduce_scatter"):
        assert communicators(calls, what) <= registered
    for name in ("separate", "shared"):
        assert "mem_alloc" not in {call.kind for call in nccl[name]}


def test_no_block_is_recorded_on_another_stream() -> None:
    program = [nccl_dry_run.__file__, "recorded"]
    printed = run_dry(program, memory=MEMORY, events="at_sync")
    assert int(printed) == 1  # the program's own


def test_an_unknown_setting_of_communicators_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lowtide._sharding import groups

    monkeypatch.setenv("LOWTIDE_COMMUNICATORS", "one")
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is compared
        groups.one_communicator()
    assert str(caught.value) == (
        "lowtide: LOWTIDE_COMMUNICATORS: expected separate or shared, got 'one'. Unset "
        "it for a communicator of reductions beside that of gathers."
    )
