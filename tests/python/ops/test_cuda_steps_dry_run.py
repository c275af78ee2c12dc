"""Training steps on CUDA without a GPU: when the host waits, whether a CUDA graph can
capture them, what NCCL is asked for. Over the stub of support/cuda_stub.py: torch's
operators, allocator, graphs and process groups are the real ones; kernels and NCCL do
nothing, and the stub refuses what CUDA refuses."""

from __future__ import annotations

import json

import pytest

from support import capture_dry_run, nccl_dry_run, steady_step_dry_run
from support.cuda_steps import KINDS
from support.cuda_stub import CudaStub, build_cuda_stub

MEMORY = 8 << 30
READ_BACK, DROPOUT = "read back", "checkpointed, dropout"
STEADY = tuple(kind for kind in KINDS if kind != READ_BACK)
CAPTURED = tuple(kind for kind in STEADY if kind != DROPOUT)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    return build_cuda_stub(tmp_path_factory.mktemp("stub"))


@pytest.mark.parametrize("events", ["immediate", "at_sync"])
def test_the_host_never_waits_in_a_steady_step(stub: CudaStub, events: str) -> None:
    program = [steady_step_dry_run.__file__]
    waits = json.loads(stub.run(program, memory=MEMORY, events=events))
    for kind in STEADY:
        assert waits[kind][1:] == [0] * 5, kind
    assert waits[READ_BACK][1:] == [1] * 5  # the loss's item() is seen


def test_small_gradients_of_a_unit_are_copied_or_added_in_one_launch(
    stub: CudaStub,
) -> None:
    program = [steady_step_dry_run.__file__, "small"]
    found = json.loads(stub.run(program, memory=MEMORY, events="immediate"))
    for few_and_many in found.values():
        assert few_and_many["2"] == few_and_many["8"]
    # The third of three backwards: added to what the first two left.
    assert found["False"]["8"] == 1


def capture(stub: CudaStub, *kinds: str) -> dict[str, dict[str, int | str]]:
    program = [capture_dry_run.__file__, *kinds]
    return json.loads(stub.run(program, memory=MEMORY, events="immediate"))


@pytest.fixture(scope="module")
def captured(stub: CudaStub) -> dict[str, dict[str, int | str]]:
    return capture(stub, *CAPTURED)


@pytest.mark.parametrize("kind", CAPTURED)
def test_a_graph_captures_a_step(captured, kind) -> None:
    """Forward, backward, clipping and the optimizer, with eager steps in between: every
    stream joins and is joined, no wait reaches out of the graph, nothing runs beside
    it."""
    assert captured[kind] == {"graphs": 2, "stray": 0}


def test_what_a_graph_can_not_capture_is_refused(stub: CudaStub) -> None:
    waits = capture(stub, READ_BACK)[READ_BACK]["refused"]
    assert waits == "CUDA error: operation not permitted when stream is capturing"
    assert capture(stub, DROPOUT)[DROPOUT]["refused"] == (
        "lowtide: checkpoint: expected no random numbers in a region that a CUDA graph "
        "captures, got operators that drew some. Computing it again takes the same "
        "numbers, and torch does not let a generator be set back during a capture: set "
        "dropout to 0 there, or capture modules that are not checkpointed."
    )


@pytest.fixture(scope="module")
def nccl(stub: CudaStub) -> dict[str, list[list[str]]]:
    program = [nccl_dry_run.__file__, "calls"]
    return json.loads(stub.run(program, memory=MEMORY, events="immediate"))


def test_a_gather_is_one_group_of_calls(nccl: dict[str, list[list[str]]]) -> None:
    calls = nccl["separate"]
    gathers = [call for call in calls if call[0] == "all_gather"]
    # Two layers in forward and in backward, the root once.
    assert len(gathers) == 5
    assert {depth for *_, depth in gathers} == {"1"}


def test_gradients_are_averaged_by_nccl(nccl: dict[str, list[list[str]]]) -> None:
    for calls in nccl.values():
        reductions = {call[2] for call in calls if call[0] == "reduce_scatter"}
        assert reductions == {"avg"}


def communicators(calls: list[list[str]], what: str) -> set[str]:
    return {communicator for name, _, _, communicator, _ in calls if name == what}


def test_reductions_have_a_communicator_of_their_own_or_share_it(
    nccl: dict[str, list[list[str]]],
) -> None:
    separate, shared = (nccl[name] for name in ("separate", "shared"))
    gather, reduce = (
        communicators(separate, what) for what in ("all_gather", "reduce_scatter")
    )
    assert (len(gather), len(reduce)) == (1, 1) and gather != reduce
    (one,) = communicators(shared, "all_gather")
    assert communicators(shared, "reduce_scatter") == {one}
    # The same collectives in the same order.
    assert [call[:3] for call in shared] == [call[:3] for call in separate]


def test_buffers_may_be_nccls_own_and_registered(
    nccl: dict[str, list[list[str]]],
) -> None:
    calls = nccl["registered"]
    registered = {call[3] for call in calls if call[0] == "register"}
    for what in ("all_gather", "reduce_scatter"):
        assert communicators(calls, what) <= registered
    for name in ("separate", "shared"):
        assert "mem_alloc" not in {call[0] for call in nccl[name]}


def test_no_block_is_recorded_on_another_stream(stub: CudaStub) -> None:
    program = [nccl_dry_run.__file__, "recorded"]
    printed = stub.run(program, memory=MEMORY, events="at_sync")
    assert int(printed) == 1  # the program's own


def test_an_unknown_setting_of_communicators_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lowtide._state import groups

    monkeypatch.setenv("LOWTIDE_COMMUNICATORS", "one")
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is compared
        groups._shared()
    assert str(caught.value) == (
        "lowtide: LOWTIDE_COMMUNICATORS: expected separate or shared, got 'one'. Unset "
        "it for a communicator of reductions beside that of gathers."
    )
