"""The device is a device like others: tensors, streams, events, generators, pinned
memory, autocast, saving and `torch.accelerator`."""

from __future__ import annotations

import io

import pytest
import torch

from support.phantom import MIB

MODES = ("exact", "meta")
# Without cuBLAS workspaces, so that figures are of the tensors alone.
PLAIN = {"cublas_workspace": 0}


def empty(mib: float, **kwargs: object) -> torch.Tensor:
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device="phantom", **kwargs)


def memory() -> tuple[float, float]:
    acc = torch.accelerator
    return acc.memory_allocated() / MIB, acc.memory_reserved() / MIB


def fresh() -> None:
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()


# -- torch.accelerator ------------------------------------------------------------


def describe() -> list[object]:
    acc = torch.accelerator
    return [
        str(acc.current_accelerator()),
        acc.is_available(),
        acc.device_count(),
        str(torch.device("phantom")),
        str(torch.empty(2, device="phantom").device),
        torch.empty(2).phantom().is_phantom,
        torch.nn.Linear(2, 2).to("phantom").weight.device.type,
    ]


@pytest.mark.parametrize("mode", MODES)
def test_it_is_the_accelerator(phantom, mode):
    assert phantom(mode, **PLAIN).run(describe) == [
        *("phantom", True, 1, "phantom", "phantom:0", True, "phantom"),
    ]


def memory_of_a_life() -> list[object]:
    fresh()
    steps = [memory()]
    one = empty(12)
    steps.append(memory())
    del one
    two = empty(11.5)
    steps.append(memory())
    peak = torch.accelerator.max_memory_allocated() / MIB
    del two
    torch.accelerator.empty_cache()
    steps.append(memory())
    torch.accelerator.reset_peak_memory_stats()
    stats = torch.accelerator.memory_stats()
    after = torch.accelerator.max_memory_reserved() / MIB
    return [steps, peak, after, stats["allocated_bytes.all.peak"]]


@pytest.mark.parametrize("mode", MODES)
def test_memory_statistics(phantom, mode):
    steps, peak, after, in_stats = phantom(mode, **PLAIN).run(memory_of_a_life)
    assert steps == [(0, 0), (12, 12), (12, 12), (0, 0)]
    assert (peak, after, in_stats) == (12, 0, 0)


# -- streams ------------------------------------------------------------------------


def pools_of_streams() -> list[object]:
    fresh()
    side = torch.Stream("phantom")
    main = torch.accelerator.current_stream()
    empty(64)
    with side:
        inside = torch.accelerator.current_stream()
        other = empty(64)
        reserved = memory()
    del other
    again = empty(64)
    return [
        inside == side,
        torch.accelerator.current_stream() == main,
        reserved,
        (memory(), again.numel()),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_each_stream_has_a_pool(phantom, mode):
    assert phantom(mode, **PLAIN).run(pools_of_streams) == [
        *(True, True, (64, 128), ((64, 128), 64 * MIB)),
    ]


def recorded_on_another_stream() -> list[object]:
    fresh()
    side = torch.Stream("phantom")
    event = torch.Event("phantom")
    event.record(side)
    block = empty(100)
    block.record_stream(side)
    done_before = event.query(), side.query()
    del block
    again = empty(100)
    reserved = [memory()[1]]
    del again
    event.synchronize()
    done_after = event.query(), side.query()
    side.synchronize()
    first, second = empty(100), empty(100)
    reserved.append(memory()[1])
    return [done_before, done_after, side.query(), reserved, first is second]


def test_work_is_done_at_once(phantom):
    assert phantom("meta", **PLAIN).run(recorded_on_another_stream) == [
        *((True, True), (True, True), True, [100, 200], False),
    ]


def test_work_is_done_when_the_host_waited(phantom):
    process = phantom("meta", events="at_sync", **PLAIN)
    assert process.run(recorded_on_another_stream) == [
        *((False, False), (True, False), True, [200, 200], False),
    ]


def stream_of_backward() -> list[int]:
    seen: list[int] = []
    side = torch.Stream("phantom")
    weight = torch.ones(4, 4, device="phantom", requires_grad=True)
    with side:
        y = weight * 2
        y.register_hook(
            lambda g: seen.append(torch.accelerator.current_stream().stream_id)
        )
        loss = (y * y).sum()
    loss.backward()
    return [*seen, side.stream_id, torch.accelerator.current_stream().stream_id]


@pytest.mark.parametrize("mode", MODES)
def test_backward_runs_on_the_streams_of_forward(phantom, mode):
    hook, side, after = phantom(mode, **PLAIN).run(stream_of_backward)
    assert hook == side != after == 0


# -- out of memory --------------------------------------------------------------------


def out_of_memory() -> list[object]:
    held = empty(60)
    try:
        empty(50)
    except torch.OutOfMemoryError as error:
        text = str(error)
    del held
    return [text, empty(90).numel() // MIB, torch.phantom.mem_get_info()[1] // MIB]


@pytest.mark.parametrize("mode", MODES)
def test_capacity(phantom, mode):
    process = phantom(mode, capacity=100 * MIB, **PLAIN)
    text, fits, total = process.run(out_of_memory)
    assert text.startswith("lowtide: ")
    assert (fits, total) == (90, 100)


# -- the rest of torch --------------------------------------------------------------


def other_features() -> dict[str, object]:
    found: dict[str, object] = {}
    a = torch.randn(4, 4, device="phantom")
    with torch.autocast("phantom", dtype=torch.bfloat16):
        found["autocast matmul"] = str((a @ a).dtype)
        found["autocast softmax"] = str(torch.softmax(a.bfloat16(), 0).dtype)
        try:
            torch.nn.functional.binary_cross_entropy(a, a)
        except RuntimeError as error:
            found["autocast refuses"] = str(error)
    pinned = torch.empty(10).pin_memory()
    found["pinned"] = (pinned.is_pinned(), torch.empty(10).is_pinned())
    found["pinned view"] = pinned[3:].is_pinned()
    loader = torch.utils.data.DataLoader([torch.ones(2)] * 2, pin_memory=True)
    found["loader"] = next(iter(loader)).is_pinned()
    file = io.BytesIO()
    torch.save({"a": a}, file)
    file.seek(0)
    found["saved"] = str(torch.load(file)["a"].device)
    storage = a.untyped_storage()
    storage.resize_(0)
    storage.resize_(256)
    found["resized"] = storage.size()
    linear = torch.nn.Linear(2, 2)
    weight = linear.weight
    linear.to("phantom")
    found["same parameter"] = (linear.weight is weight, weight.device.type)
    found["module"] = torch.phantom.device_count()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        a * a
    return found


@pytest.mark.parametrize("mode", MODES)
def test_features_of_torch(phantom, mode):
    assert phantom(mode, **PLAIN).run(other_features) == {
        "autocast matmul": "torch.bfloat16",
        "autocast softmax": "torch.float32",
        "autocast refuses": "lowtide: binary_cross_entropy: expected a loss that is "
        "safe under autocast, got binary_cross_entropy. Use "
        "binary_cross_entropy_with_logits, or disable autocast for it.",
        "pinned": (True, False),
        "pinned view": True,
        "loader": True,
        "saved": "phantom:0",
        "resized": 256,
        "same parameter": (True, "phantom"),
        "module": 1,
    }


def random_numbers() -> dict[str, object]:
    def drawn(device: str) -> torch.Tensor:
        return torch.randn(100, device=device).cpu()

    torch.manual_seed(3)
    cpu = torch.cat([drawn("cpu"), torch.rand(7)])
    torch.manual_seed(3)
    mine = torch.cat([drawn("phantom"), torch.rand(7, device="phantom").cpu()])
    state = torch.phantom.get_rng_state()
    first = drawn("phantom")
    torch.phantom.set_rng_state(state)
    second = drawn("phantom")
    shifted = state.clone()
    shifted[8:].view(torch.int64).add_(400)
    torch.phantom.set_rng_state(shifted)
    third = drawn("phantom")
    torch.phantom.set_rng_state(shifted)
    fourth = drawn("phantom")
    generator = torch.Generator("phantom").manual_seed(5)
    own = torch.rand(4, device="phantom", generator=generator).cpu()
    reference = torch.rand(4, generator=torch.Generator().manual_seed(5))
    try:
        torch.rand(4, device="phantom", generator=torch.Generator())
    except RuntimeError as error:
        refused = str(error)
    torch.manual_seed(9)
    dropped = torch.nn.functional.dropout(torch.ones(50, device="phantom"), 0.5).cpu()
    torch.manual_seed(9)
    reference_dropped = torch.nn.functional.dropout(torch.ones(50), 0.5)
    return {
        "as on the CPU": torch.equal(cpu, mine),
        "state": (state.numel(), torch.equal(first, second)),
        "moved offset": (torch.equal(third, first), torch.equal(third, fourth)),
        "own generator": torch.equal(own, reference),
        "dropout": torch.equal(dropped, reference_dropped),
        "refused": refused,
    }


def test_random_numbers_are_those_of_the_cpu(phantom):
    assert phantom("exact", **PLAIN).run(random_numbers) == {
        "as on the CPU": True,
        "state": (16, True),
        "moved offset": (False, True),
        "own generator": True,
        "dropout": True,
        "refused": "lowtide: aten::uniform_: expected a generator of device "
        "phantom, got one of cpu. Make it with torch.Generator(device='phantom').",
    }


# -- messages -----------------------------------------------------------------------


def messages() -> list[str]:
    import lowtide.phantom

    texts = []
    for action in (
        lambda: lowtide.phantom.install("meta"),
        lambda: torch.empty(1, device="phantom:3"),
        lambda: torch.phantom.set_device(3),
        lambda: torch.ones(3, device="phantom").masked_fill_(torch.ones(3) > 0, 1),
        lambda: torch.phantom.mem_get_info(),
        lambda: torch.phantom.set_rng_state(torch.zeros(3, dtype=torch.uint8)),
    ):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            action()
        texts.append(str(raised.value))
    return texts


def test_messages(phantom):
    assert phantom("exact", **PLAIN).run(messages) == [
        "lowtide: phantom: expected one device per process, got a second install. "
        "Choose its settings in the first call, or start another process.",
        "lowtide: phantom: expected device phantom:0, the only one of a process, got "
        "index 3. A process simulates one rank; use torch.device('phantom').",
        "lowtide: phantom: expected device phantom:0, the only one of a process, got "
        "index 3. A process simulates one rank; use torch.device('phantom').",
        "lowtide: phantom: operator aten::masked_fill_: expected all tensors on one "
        "device, got phantom:0 and cpu. Move the other tensor with .to('phantom').",
        "lowtide: phantom: expected a device with a capacity, got one without. Pass "
        "install(capacity=...).",
        "lowtide: phantom generator: expected a state of 16 bytes on the CPU, got 3 "
        "elements of unsigned char on cpu. Pass what get_state() returned on this "
        "device.",
    ]


def install_after_a_backward() -> str:
    import lowtide.phantom

    torch.ones(1, requires_grad=True).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        lowtide.phantom.install("meta")
    return str(raised.value)


def world_without_a_device() -> str:
    import lowtide.phantom

    with pytest.raises(RuntimeError) as raised:
        lowtide.phantom.init_world(2)
    return str(raised.value)


def test_a_world_needs_a_device():
    from support.ranks import RankPool

    with RankPool(1, group=False) as pool:
        assert pool.run(world_without_a_device) == [
            "lowtide: phantom: expected an installed device, got none. Call "
            "lowtide.phantom.install() first."
        ]


def test_a_late_install_says_so():
    from support.ranks import RankPool

    with RankPool(1, group=False) as pool:
        assert pool.run(install_after_a_backward) == [
            "lowtide: phantom: expected an install before the first backward of the "
            "process, got one after it. Call lowtide.phantom.install() first: autograd "
            "starts its threads, one for each device, at the first backward."
        ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"mode": "fast"},
            'lowtide: phantom mode: expected "exact" or "meta", got "fast". Exact '
            "computes on the CPU, meta only counts memory.",
        ),
        (
            {"events": "late"},
            'lowtide: phantom events: expected "immediate" or "at_sync", got "late". '
            "Immediate gives the lower bound of what is reserved, at_sync the upper.",
        ),
    ],
)
def test_settings_are_checked(arguments, text):
    import lowtide.phantom

    with pytest.raises(ValueError) as raised:  # noqa: PT011
        lowtide.phantom.install(**arguments)
    assert str(raised.value) == text


# -- inference mode -----------------------------------------------------------------


def made_in_inference_mode(device: str) -> list[object]:
    weight = torch.ones(4, 2, device=device)
    with torch.inference_mode():
        x = torch.ones(3, 2, device=device)
        views = weight.t(), weight.view(2, 4), weight[1], weight.detach(), x.t()
        values = x + 1, torch.nn.functional.linear(x, weight)
    return [tensor.is_inference() for tensor in (*views, *values)]


@pytest.mark.parametrize("mode", MODES)
def test_views_in_inference_mode_are_what_their_base_is(phantom, mode):
    on_cpu = made_in_inference_mode("cpu")
    assert phantom(mode, **PLAIN).run(made_in_inference_mode, "phantom") == on_cpu
    assert on_cpu == [False, False, False, False, True, True, True]
