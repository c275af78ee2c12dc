"""The phantom keeps time: rooflines, joins, phases and what is written of them.

Figures are computed by hand from those of ``lowtide.phantom.machines``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowtide.phantom
from lowtide.phantom import machines
from lowtide.phantom.clock import Span
from lowtide.phantom.machines import H100
from support.ranks import RankFailure

BF16 = torch.bfloat16
PRODUCT = H100.half * H100.product_efficiency
ATTENTION = H100.half * H100.attention_efficiency
MEMORY = H100.memory_bandwidth * H100.memory_efficiency
# Data that makes figures simple: a byte takes a second, nothing has latency.
PLAIN_PROTOCOL = machines.Protocol(0, 0, 0, 0, 1, 1, (1e9, 1e9, 1e9))
PLAIN = machines.Accelerator(
    "plain", 1, 1, 1, 1, 1, 1, memory_efficiency=1, kernel_floor=0, host_bandwidth=1
)
PLAIN_NETWORK = machines.Network(1, 1, 8, (PLAIN_PROTOCOL,), ())


def plain() -> lowtide.phantom.timeline:
    return lowtide.phantom.timeline(PLAIN, network=PLAIN_NETWORK, issue_cost=0)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="phantom")


def spans_of(time: lowtide.phantom.timeline) -> list[Span]:
    return [span for span in time.spans() if span.kind != "wait"]


# -- rooflines ------------------------------------------------------------------------


def durations() -> dict[str, tuple[str, float]]:
    """By what was run: the only kernel's name and seconds."""
    a, b = empty(4096, 8192, dtype=BF16), empty(8192, 2048, dtype=BF16)
    wide = empty(1 << 26)
    table, rows = (
        empty(100_000, 1024),
        torch.zeros(2048, dtype=torch.long).to("phantom"),
    )
    heads = empty(1, 32, 4096, 128, dtype=BF16)
    row = empty(1, 4096).expand(16384, 4096)
    calls = {
        "mm": lambda: a @ b,
        "add": lambda: wide + wide,
        "add_": lambda: wide.add_(1),
        "zero_": lambda: wide.zero_(),
        "cast": lambda: wide.to(BF16),
        "expanded": lambda: row + 1,
        "embedding": lambda: torch.nn.functional.embedding(rows, table),
        "attention": lambda: torch.nn.functional.scaled_dot_product_attention(
            heads, heads, heads, is_causal=True
        ),
        "small": lambda: empty(4) + 1,
    }
    found = {}
    with torch.no_grad():
        for name, call in calls.items():
            with lowtide.phantom.timeline("h100") as time:
                call()
            (span,) = spans_of(time)
            found[name] = (span.name, span.end - span.begin)
    return found


@pytest.fixture(scope="module")
def kernels(phantom):
    return phantom("meta").run(durations)


FP32 = 4 * (1 << 26)


@pytest.mark.parametrize(
    ("call", "operator", "seconds"),
    [
        ("mm", "aten::mm", 2 * 4096 * 8192 * 2048 / PRODUCT),
        ("add", "aten::add", 3 * FP32 / MEMORY),
        ("add_", "aten::add", 2 * FP32 / MEMORY),
        ("zero_", "aten::zero_", FP32 / MEMORY),
        ("cast", "aten::copy_", 1.5 * FP32 / MEMORY),
        # The row is read once, the result written.
        ("expanded", "aten::add", 4 * (4096 + 16384 * 4096) / MEMORY),
        # As many rows read as written, and the indices.
        ("embedding", "aten::index_select", (2 * 2048 * 4096 + 8 * 2048) / MEMORY),
        # Two products of 4096 x 4096 x 128 for 32 heads, the upper half left out.
        ("attention", "attention", 2 * 2 * 32 * 4096**2 * 128 / 2 / ATTENTION),
        ("small", "aten::add", H100.kernel_floor),
    ],
)
def test_kernel_takes_its_roofline(kernels, call, operator, seconds):
    name, taken = kernels[call]
    assert name == operator
    assert taken == pytest.approx(seconds, rel=1e-9)


def backward_durations() -> dict[str, float]:
    x = empty(2048, 4096, dtype=BF16).requires_grad_()
    heads = empty(1, 8, 1024, 64, dtype=BF16).requires_grad_()
    weight = empty(512, 4096, dtype=BF16).requires_grad_()
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    product = torch.nn.functional.linear(x, weight)
    with lowtide.phantom.timeline("h100", issue_cost=0) as time:
        for result in (attended, product):
            result.backward(torch.empty_like(result))
    flops: dict[str, float] = {}
    for span in spans_of(time):
        if span.flops:
            flops[span.name] = flops.get(span.name, 0) + span.flops
    return flops


def test_backward_kernels_have_their_flops(phantom):
    assert phantom("meta").run(backward_durations) == {
        # Scores again, then two products each for them and for the values.
        "attention backward": 5 * 2 * 8 * 1024**2 * 64,
        "aten::mm": 2 * (2 * 2048 * 4096 * 512),
    }


def convolution_flops() -> list[float]:
    x, weight = empty(8, 16, 32, 32).requires_grad_(), empty(64, 16, 3, 3)
    with lowtide.phantom.timeline("h100") as time:
        convolved = torch.nn.functional.conv2d(x, weight, padding=1)
        convolved.backward(torch.empty_like(convolved))
        weight.requires_grad_()
        convolved = torch.nn.functional.conv2d(x, weight, padding=1)
        convolved.backward(torch.empty_like(convolved))
    return [span.flops for span in spans_of(time) if span.flops]


def test_convolution_has_a_product_each_way(phantom):
    names = ["aten::convolution", "aten::convolution_backward"]
    flops = phantom("meta", allow=names).run(convolution_flops)
    each = 2 * (8 * 64 * 32 * 32) * (16 * 3 * 3)
    # Without the weight's gradient, and with it.
    assert flops == [each, each, each, 2 * each]


def issued() -> list[float]:
    x = empty(4)
    with lowtide.phantom.timeline("h100", issue_cost=0.25) as time:
        for _ in range(3):
            x.add_(1)
        x.view(2, 2)
        x.add_(1)
    return [span.begin for span in spans_of(time)]


def test_host_pays_for_every_operator(phantom):
    assert phantom("meta").run(issued) == [0.25, 0.5, 0.75, 1.25]


# -- streams and events ---------------------------------------------------------------


def joined_streams() -> dict[str, Any]:
    side = torch.Stream(device="phantom")
    x = empty(10, dtype=torch.uint8)
    with plain() as time:
        x.zero_()  # 0..10
        first, second = (torch.phantom.Event(enable_timing=True) for _ in range(2))
        first.record()
        with side:
            x[:5].zero_()  # 0..5
            side.wait_event(first)
            x[:1].zero_()  # 10..11
            second.record()
        x[:3].zero_()  # 10..13
        second.synchronize()
        host = time.now()
        torch.phantom.current_stream().wait_event(second)
    waits = [span for span in time.spans() if span.kind == "wait"]
    return {
        "kernels": [(s.stream != 0, s.begin, s.end) for s in spans_of(time)],
        "waits": [(s.stream != 0, s.begin, s.end) for s in waits],
        "elapsed": first.elapsed_time(second),
        "host": host,
    }


def test_events_join_streams(phantom):
    found = phantom("meta").run(joined_streams)
    assert found["kernels"] == [
        (False, 0, 10),
        (True, 0, 5),
        (True, 10, 11),
        (False, 10, 13),
    ]
    assert found["waits"] == [(True, 5, 10)]
    assert found["elapsed"] == 1000  # ms
    assert found["host"] == 13


def events_of_an_earlier_timeline() -> dict[str, Any]:
    before, after = (torch.phantom.Event(enable_timing=True) for _ in range(2))
    x = empty(10, dtype=torch.uint8)
    with plain():
        x.zero_()
        before.record()  # at 10
    with plain() as time:
        torch.phantom.current_stream().wait_event(before)
        x.zero_()
        after.record()
    return {
        "spans": [(span.kind, span.begin, span.end) for span in time.spans()],
        "elapsed": before.elapsed_time(after),
    }


def test_what_an_earlier_timeline_recorded_is_over(phantom):
    found = phantom("meta").run(events_of_an_earlier_timeline)
    assert found["spans"] == [("kernel", 0, 10)]
    assert 0 <= found["elapsed"] < 60_000  # the host's, not simulated


def read_back() -> list[tuple[str, float, float]]:
    x = empty(10, dtype=torch.uint8)
    with plain() as time:
        x.zero_()  # 0..10
        x[0].item()  # 10..11
        x.zero_()  # 11..21
        x.cpu()  # 21..31, the host waits
        host = torch.zeros(5, dtype=torch.uint8)
        x[:5].copy_(host, non_blocking=True)
    return [(span.kind, span.begin, span.end) for span in time.spans()]


def test_reading_a_value_takes_a_transfer_and_stops_the_host(phantom):
    assert phantom("meta").run(read_back) == [
        ("kernel", 0, 10),
        ("transfer", 10, 11),
        ("kernel", 11, 21),
        ("transfer", 21, 31),
        ("transfer", 31, 36),
    ]


def ran_without_a_timeline() -> tuple[int, float]:
    empty(10).zero_()
    with plain() as time:
        pass
    empty(10).zero_()
    return len(time.spans()), lowtide.phantom.timeline.now()


def test_nothing_is_recorded_outside_the_block(phantom):
    assert phantom("meta").run(ran_without_a_timeline) == (0, 0.0)


# -- collectives ---------------------------------------------------------------------


def world_of_eight() -> None:
    if not dist.is_initialized():
        lowtide.phantom.init_world(8)


def gathered(compute: int, async_op: bool) -> tuple[dict[str, float], list[Any]]:
    world_of_eight()
    mine, full = empty(1, dtype=torch.uint8), empty(8, dtype=torch.uint8)
    x = empty(max(compute, 1), dtype=torch.uint8)
    with plain() as time:
        time.begin_step()
        time.phase("forward")
        work = dist.all_gather_into_tensor(full, mine, async_op=async_op)
        if compute:
            x.zero_()
        if work is not None:
            work.wait()
        full.zero_()
    report = time.report()
    return vars(report.step), spans_of(time)


def test_a_collective_beside_compute_is_hidden(phantom):
    step, spans = phantom("meta").run(gathered, 7, True)
    # 7/8 of 8 bytes: as long as the kernel.
    assert [(s.kind, s.begin, s.end) for s in spans] == [
        ("collective", 0, 7),
        ("kernel", 0, 7),
        ("kernel", 7, 15),
    ]
    assert step["communication"] == 7 and step["exposed"] == 0


def test_a_collective_that_is_waited_for_is_exposed(phantom):
    step, spans = phantom("meta").run(gathered, 3, True)
    assert [s.begin for s in spans] == [0, 0, 7]
    assert step == {
        "seconds": 15,
        "compute": 11,
        "other_kernels": 0,
        "communication": 7,
        "exposed": 4,
        "other_waits": 0,
        "idle": 0,
    }


def test_a_synchronous_collective_runs_on_the_stream_of_its_caller(phantom):
    step, spans = phantom("meta").run(gathered, 7, False)
    assert [(s.stream, s.begin, s.end) for s in spans] == [
        (0, 0, 7),
        (0, 7, 14),
        (0, 14, 22),
    ]
    assert step["exposed"] == 7


def coalesced() -> list[tuple[str, float]]:
    world_of_eight()
    device = torch.device("phantom")
    pieces = [empty(1, dtype=torch.uint8) for _ in range(3)]
    fulls = [empty(8, dtype=torch.uint8) for _ in range(3)]
    with plain() as time:
        with dist._coalescing_manager(device=device, async_ops=True) as together:
            for full, piece in zip(fulls, pieces, strict=True):
                dist.all_gather_into_tensor(full, piece)
        together.wait()
        dist.all_reduce(fulls[0])
        dist.reduce_scatter_tensor(pieces[0], fulls[0])
        dist.broadcast(fulls[0], 0)
        dist.all_to_all_single(fulls[1], fulls[0])
    return [(span.name, span.end - span.begin) for span in spans_of(time)]


def test_coalesced_calls_are_one_collective(phantom):
    assert phantom("meta").run(coalesced) == [
        ("all-gather", 21),
        ("all-reduce", 14),
        ("reduce-scatter", 7),
        ("broadcast", 8),
        ("all-to-all", 7),
    ]


def groups_over_nodes() -> list[float]:
    world_of_eight()
    near, far = dist.new_group([0, 1]), dist.new_group([0, 4])
    network = machines.Network(10, 1, 4, (PLAIN_PROTOCOL,), ())
    x = empty(20, dtype=torch.uint8)
    with lowtide.phantom.timeline(PLAIN, network=network) as time:
        dist.all_reduce(x, group=near)
        dist.all_reduce(x, group=far)
    return [span.end - span.begin for span in spans_of(time)]


def test_a_group_over_nodes_takes_the_network(phantom):
    assert phantom("meta").run(groups_over_nodes) == pytest.approx([2, 20])


def gathered_on_the_host() -> tuple[str, bool]:
    world_of_eight()
    same = torch.tensor([3.0])
    copies = [torch.zeros(1) for _ in range(8)]
    dist.all_gather(copies, same)  # torch copies, for validations that compare
    return dist.get_backend(), all(copy.item() == 3 for copy in copies)


def test_fake_group_is_torchs_fake_one(phantom):
    assert phantom("meta").run(gathered_on_the_host) == ("fake", True)


# -- reports --------------------------------------------------------------------------


def two_steps(directory: str) -> dict[str, Any]:
    x = empty(10, dtype=torch.uint8)
    with plain() as time:
        for step in range(2):
            time.begin_step()
            for _ in range(2):
                time.phase("forward")
                x.zero_()
                time.phase("backward")
                x.zero_()
                if step == 1:
                    x.zero_()
    time.chrome_trace(Path(directory) / "all.json")
    time.chrome_trace(Path(directory) / "last.json", step=-1)
    time.picture(Path(directory) / "step.png")
    return {"first": time.report(0), "last": time.report(), "text": str(time.report())}


@pytest.fixture(scope="module")
def reports(phantom, tmp_path_factory):
    directory = tmp_path_factory.mktemp("timeline")
    return directory, phantom("meta").run(two_steps, str(directory))


def test_report_adds_up_the_phases_of_a_step(reports):
    _, found = reports
    assert found["first"].step.seconds == 40
    last = found["last"]
    assert list(last.phases) == ["forward", "backward"]
    assert last.phases["forward"].seconds == 20
    assert last.phases["backward"].compute == 40
    assert last.step.seconds == 60
    assert "backward       40000.00" in found["text"]
    assert last.assumptions["accelerator"]["memory_bandwidth"] == 1


def test_chrome_trace_has_every_span_and_phase(reports):
    directory, _ = reports
    for name, kernels, phases in (("all", 10, 8), ("last", 6, 4)):
        trace = json.loads((directory / f"{name}.json").read_text())
        events = trace["traceEvents"]
        threads = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
        assert threads == {"compute": 0, "phases": -1}
        complete = [e for e in events if e["ph"] == "X"]
        assert [e["cat"] for e in complete].count("kernel") == kernels
        assert [e["cat"] for e in complete].count("phase") == phases
        assert {e["dur"] for e in complete if e["cat"] == "kernel"} == {10e6}
        assert trace["otherData"]["kind"] == "simulated"


def test_picture_is_written(reports):
    directory, _ = reports
    assert (directory / "step.png").read_bytes()[:4] == b"\x89PNG"


# -- messages -------------------------------------------------------------------------


def failing(what: str) -> None:
    if what == "nested":
        with plain(), plain():
            pass
    elif what == "unlisted":
        lowtide.phantom.timeline("a100")
    elif what == "early":
        with plain() as time:
            time.report()
    elif what == "no step":
        with plain() as time:
            time.phase("forward")
        time.report()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "nested",
            "lowtide: phantom timeline: expected one at a time, got another one that "
            "still runs. Leave the `with` block of the first.",
        ),
        (
            "unlisted",
            "lowtide: phantom.timeline: expected one of h100, h200, got 'a100'. Pass a "
            "lowtide.phantom.machines.Accelerator for others.",
        ),
        (
            "early",
            "lowtide: phantom.timeline: expected a report after the `with` block, got "
            "one before its end. Leave the block first.",
        ),
        (
            "no step",
            "lowtide: phantom.timeline: expected at least one begin_step(), got none. "
            "Call it before the phases of each step.",
        ),
    ],
)
def test_messages(phantom, what, message):
    with pytest.raises(RankFailure) as failure:
        phantom("meta").run(failing, what)
    assert message in str(failure.value)
