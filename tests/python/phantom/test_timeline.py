"""The phantom GPU keeps time: rooflines, streams, events, collectives, graphs, and what
is written of them.

Figures are computed by hand from those of ``lowtide.phantom.machines``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lowtide.phantom
from lowtide.phantom import machines
from lowtide.phantom.dry.launch import Machine
from lowtide.phantom.dry.timekeeper import Span
from lowtide.phantom.machines import H100
from support.dry_process import call_dry

pytestmark = pytest.mark.skipif(not torch.version.cuda, reason="a CPU build of torch")

BF16 = torch.bfloat16
PRODUCT = H100.half * H100.product_efficiency
ATTENTION = H100.half * H100.attention_efficiency
MEMORY = H100.memory_bandwidth * H100.memory_efficiency
# Data that makes figures simple: a byte takes a second, nothing has latency.
PLAIN_PROTOCOL = machines.Protocol(0, 0, 0, 0, 1, 1, (1e9, 1e9, 1e9))
PLAIN = machines.Accelerator(
    "plain",
    *(1, 1, 1, 1, 1, 1),
    memory_efficiency=1,
    kernel_floor=0,
    host_bandwidth=1,
    block_seconds=0,
)
# Whose memory is so fast that a collective takes nothing of it.
FAST = dataclasses.replace(PLAIN, memory_bandwidth=1e6)
PLAIN_NETWORK = machines.Network(1, 1, 8, (PLAIN_PROTOCOL,), (), channel_bandwidth=1e9)
FREE = machines.Host(0, 0, 0, 0, 0)


def plain(accelerator: machines.Accelerator = PLAIN) -> lowtide.phantom.timeline:
    return lowtide.phantom.timeline(accelerator, network=PLAIN_NETWORK, host=FREE)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def spans_of(time: lowtide.phantom.timeline) -> list[Span]:
    return [span for span in time.spans() if span.kind != "wait"]


# -- rooflines ------------------------------------------------------------------------


def kernels() -> dict[str, list[tuple[str, float, float]]]:
    """By what was run: the name, seconds and FLOPs of what it launched."""
    a, b = empty(4096, 8192, dtype=BF16), empty(8192, 2048, dtype=BF16)
    wide = empty(1 << 26)
    table, rows = empty(100_000, 1024), torch.zeros(2048, dtype=torch.long).cuda()
    heads = empty(1, 32, 4096, 128, dtype=BF16)
    row = empty(1, 4096).expand(16384, 4096)
    x, filters = empty(8, 16, 32, 32).requires_grad_(), empty(64, 16, 3, 3)
    convolved = F.conv2d(x, filters, padding=1)
    leaf = heads.detach().requires_grad_()
    attended = F.scaled_dot_product_attention(leaf, leaf, leaf)
    product = F.linear(a.requires_grad_(), empty(512, 8192, dtype=BF16))
    calls: dict[str, Callable[[], Any]] = {
        "mm": lambda: a.detach() @ b,
        "add": lambda: wide + wide,
        "add_": lambda: wide.add_(1),
        "cast": lambda: wide.to(BF16),
        "expanded": lambda: row + 1,
        "embedding": lambda: F.embedding(rows, table),
        "attention": lambda: F.scaled_dot_product_attention(
            heads, heads, heads, is_causal=True
        ),
        "attention backward": lambda: attended.backward(heads),
        "linear backward": lambda: product.backward(torch.empty_like(product)),
        "convolution": lambda: F.conv2d(x.detach(), filters, padding=1),
        "convolution backward": lambda: convolved.backward(torch.empty_like(convolved)),
        "small": lambda: empty(4) + 1,
    }
    found = {}
    for name, call in calls.items():
        with lowtide.phantom.timeline("h100") as time:
            call()
        spans = spans_of(time)
        found[name] = [(s.name, s.end - s.begin, s.flops) for s in spans]
    return found


@pytest.fixture(scope="module")
def launched():
    return call_dry(kernels)


FP32 = 4 * (1 << 26)


@pytest.mark.parametrize(
    ("call", "operator", "seconds"),
    [
        ("mm", "aten::mm", 2 * 4096 * 8192 * 2048 / PRODUCT),
        ("add", "aten::add", 3 * FP32 / MEMORY),
        ("add_", "aten::add_", 2 * FP32 / MEMORY),
        ("cast", "aten::copy_", 1.5 * FP32 / MEMORY),
        # The row is read once, the result written.
        ("expanded", "aten::add", 4 * (4096 + 16384 * 4096) / MEMORY),
        # As many rows read as written, and the indices.
        ("embedding", "aten::gather", (2 * 2048 * 4096 + 8 * 2048) / MEMORY),
        ("small", "aten::add", H100.kernel_floor),
    ],
)
def test_kernel_takes_its_roofline(launched, call, operator, seconds):
    ((name, taken, _),) = launched[call]
    assert name == operator
    assert taken == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        # Two products of 4096 x 4096 x 128 for 32 heads, the upper half left out.
        ("attention", 2 * 2 * 32 * 4096**2 * 128 / 2),
        # Scores again, then two products each for them and for the values.
        ("attention backward", 5 * 2 * 32 * 4096**2 * 128),
        ("linear backward", 2 * 4096 * 8192 * 512),
        ("convolution", 2 * (8 * 64 * 32 * 32) * (16 * 3 * 3)),
        ("convolution backward", 2 * (8 * 64 * 32 * 32) * (16 * 3 * 3)),
    ],
)
def test_operators_have_their_flops(launched, call, flops):
    assert sum(flops for _, _, flops in launched[call]) == flops


def test_attention_reaches_less_of_the_peak(launched):
    taken = sum(seconds for _, seconds, _ in launched["attention"])
    flops = sum(flops for _, _, flops in launched["attention"])
    assert taken == pytest.approx(flops / ATTENTION, rel=0.05)


# -- streams, events, the host, graphs -------------------------------------------------


def on_streams() -> dict[str, Any]:
    return {
        "issued": issued(),
        "joined": joined_streams(),
        "earlier": events_of_an_earlier_timeline(),
        "read": read_back(),
        "outside": ran_without_a_timeline(),
        "graph": graph(),
        "errors": errors(),
    }


def issued() -> list[float]:
    x = empty(4)
    host = machines.Host(launch=0.25, library_call=8, collective=0, event=0, graph=0)
    with lowtide.phantom.timeline("h100", host=host) as time:
        for _ in range(3):
            x.add_(1)
        x.view(2, 2)
        x.add_(1)
    return [span.issued for span in spans_of(time)]


def joined_streams() -> dict[str, Any]:
    side = torch.cuda.Stream()
    x = empty(10, dtype=torch.uint8)
    with plain() as time:
        x.fill_(1)  # 0..10
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        with torch.cuda.stream(side):
            side.wait_event(first)
            x[:1].fill_(1)  # 10..11
            second.record()
        torch.cuda.current_stream().wait_event(second)
        x[:3].fill_(1)  # 11..14
        elapsed = first.elapsed_time(second)
        torch.cuda.synchronize()
        host = time.now()
    spans = [(s.kind, s.stream != 0, s.begin, s.end) for s in time.spans()]
    return {"spans": sorted(spans), "elapsed": elapsed, "host": host}


def events_of_an_earlier_timeline() -> dict[str, Any]:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = empty(10, dtype=torch.uint8)
    with plain():
        x.fill_(1)
        before.record()  # at 10
    with plain() as time:
        torch.cuda.current_stream().wait_event(before)
        x.fill_(1)
        after.record()
    return {
        "spans": [(span.kind, span.begin, span.end) for span in time.spans()],
        "elapsed": before.elapsed_time(after),
    }


def read_back() -> list[tuple[str, float, float]]:
    x = empty(10, dtype=torch.uint8)
    with plain() as time:
        x.fill_(1)  # 0..10
        x[0].item()  # 10..11
        x.fill_(1)  # 11..21
        x.cpu()  # 21..31, the host waits
        host = torch.zeros(5, dtype=torch.uint8).pin_memory()
        x[:5].copy_(host, non_blocking=True)
    return [(span.kind, span.begin, span.end) for span in time.spans()]


def ran_without_a_timeline() -> tuple[int, float]:
    empty(10).zero_()
    with plain() as time:
        pass
    empty(10).zero_()
    return len(time.spans()), lowtide.phantom.timeline.now()


def graph() -> list[tuple[float, float]]:
    x = empty(10, dtype=torch.uint8)
    x.add_(1)
    captured = torch.cuda.CUDAGraph()
    with plain() as time:
        with torch.cuda.graph(captured):
            x.add_(1)
        for _ in range(2):
            captured.replay()
    return [(s.begin, s.end) for s in spans_of(time) if s.name == "aten::add_"]


def errors() -> list[str]:
    found = []
    for act in (
        lambda: plain().__enter__().report(),
        lambda: plain().__enter__(),
        lambda: lowtide.phantom.timeline("tpu"),
    ):
        try:
            act()
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def streams():
    return call_dry(on_streams)


def test_host_pays_for_every_launch(streams):
    assert streams["issued"] == [0.25, 0.5, 0.75, 1.0]


def test_events_join_streams(streams):
    found = streams["joined"]
    assert found["spans"] == [
        ("kernel", False, 0, 10),
        ("kernel", False, 11, 14),
        ("kernel", True, 10, 11),
        ("wait", False, 10, 11),
        ("wait", True, 0, 10),
    ]
    assert found["elapsed"] == 1000  # ms
    assert found["host"] == 14


def test_what_an_earlier_timeline_recorded_is_over(streams):
    assert streams["earlier"]["spans"] == [("kernel", 0, 10)]
    assert streams["earlier"]["elapsed"] == 1  # ms, where no time is kept


def test_reading_a_value_takes_a_transfer_and_stops_the_host(streams):
    assert streams["read"] == [
        ("kernel", 0, 10),
        ("transfer", 10, 11),
        ("kernel", 11, 21),
        ("transfer", 21, 31),
        ("transfer", 31, 36),
    ]


def test_nothing_is_recorded_outside_the_block(streams):
    assert streams["outside"] == (0, 0.0)


def test_a_graph_takes_its_time_at_every_replay(streams):
    first, second = streams["graph"]
    # Read and written; beside the first replay torch sets its generators' seeds.
    assert second[1] - second[0] == 20 <= first[1] - first[0]
    assert second[0] >= first[1]


def test_errors_say_what_to_do(streams):
    early, nested, unknown = streams["errors"]
    assert "a report after the `with` block" in early
    assert "expected one at a time, got another one" in nested
    assert "expected one of" in unknown and "'tpu'" in unknown


def test_a_process_without_the_driver_is_told_how_to_start():
    with pytest.raises(RuntimeError, match="Start it with `python -m lowtide phantom"):
        lowtide.phantom.timeline("h100").__enter__()


# -- collectives ----------------------------------------------------------------------


def collectives() -> dict[str, Any]:
    dist.init_process_group("nccl")
    gathered(0, True)  # makes the communicator
    return {
        "hidden": gathered(7, True),
        "exposed": gathered(3, True),
        "synchronous": gathered(7, False),
        "groups": groups(),
    }


def gathered(compute: int, async_op: bool) -> tuple[dict[str, float], list[Any]]:
    mine, full = empty(1, dtype=torch.uint8), empty(8, dtype=torch.uint8)
    x = empty(max(compute, 1) * 1_000_000, dtype=torch.uint8)
    with plain(FAST) as time:
        time.begin_step()
        time.phase("forward")
        work = dist.all_gather_into_tensor(full, mine, async_op=async_op)
        if compute:
            x.fill_(1)
        if work is not None:
            work.wait()
        x[:1_000_000].fill_(1)
    spans = [(s.kind, round(s.begin, 3), round(s.end, 3)) for s in spans_of(time)]
    return vars(time.report().step), sorted(spans, key=lambda span: span[1:])


def groups() -> dict[str, Any]:
    """Of two halves of the world, one in a node, one across both, on H100s."""
    near = dist.new_group(range(4))
    far = dist.new_group([0, 2, 4, 6])
    big = empty(1 << 26)
    small = [empty(1 << 10) for _ in range(3)]
    for group in (near, far):
        dist.all_reduce(big, group=group)
    found = {}
    with lowtide.phantom.timeline("h100", ranks_per_node=4) as time:
        for group in (near, far):
            dist.all_reduce(big, group=group)
        sends = [dist.P2POp(dist.isend, each, 1, near) for each in small]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
    found["seconds"] = [s.end - s.begin for s in spans_of(time)]
    found["bytes"] = [s.bytes for s in spans_of(time)]
    return found


@pytest.fixture(scope="module")
def communicated():
    return call_dry(collectives, machine=Machine(world=8))


def test_a_collective_beside_compute_is_hidden(communicated):
    step, spans = communicated["hidden"]
    # 7/8 of 8 bytes: as long as the kernel.
    assert spans == [("collective", 0, 7), ("kernel", 0, 7), ("kernel", 7, 8)]
    assert step["communication"] == pytest.approx(7)
    assert step["exposed"] == pytest.approx(0, abs=1e-3)


def test_a_collective_that_is_waited_for_is_exposed(communicated):
    step, spans = communicated["exposed"]
    assert spans == [("kernel", 0, 3), ("collective", 0, 7), ("kernel", 7, 8)]
    assert step["exposed"] == pytest.approx(4, abs=1e-3)
    assert step["seconds"] == pytest.approx(
        step["compute"] + step["exposed"] + step["other_waits"] + step["idle"]
    )


def test_a_synchronous_collective_runs_on_the_stream_of_its_caller(communicated):
    step, spans = communicated["synchronous"]
    assert spans == [("collective", 0, 7), ("kernel", 7, 14), ("kernel", 14, 15)]
    assert step["exposed"] == pytest.approx(7)


def test_a_group_over_nodes_is_slower_and_calls_of_one_group_are_one_kernel(
    communicated,
):
    near, far, small = communicated["groups"]["seconds"]
    assert far > 2 * near
    assert communicated["groups"]["bytes"][2] == 3 * 4 * (1 << 10)
    assert small < near / 5


# -- what is written ------------------------------------------------------------------


def written(directory: str) -> dict[str, Any]:
    x = empty(1 << 20)
    with lowtide.phantom.timeline() as time:
        for _ in range(2):
            time.begin_step()
            time.phase("forward")
            x.add_(1)
            time.phase("backward")
            x.mul_(2)
    time.chrome_trace(Path(directory, "trace.json"), step=-1)
    time.picture(Path(directory, "step.png"))
    report = time.report()
    return {"dict": report.to_dict(), "text": str(report)}


def test_report_trace_and_picture(tmp_path):
    found = call_dry(written, str(tmp_path), machine=Machine(gpu="h200"))
    assert list(found["dict"]["phases"]) == ["forward", "backward"]
    assumed = found["dict"]["assumptions"]
    assert assumed["accelerator"]["memory_bandwidth"] == 4.8e12  # the GPU it sees
    assert "simulated, ms" in found["text"]
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {"aten::add_", "aten::mul_", "forward", "backward"} <= set(names)
    assert (tmp_path / "step.png").stat().st_size > 1000
