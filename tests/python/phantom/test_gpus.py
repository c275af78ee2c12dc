"""What programs and libraries are told of the GPU that stands there, and what they then
choose: by torch's and Triton's own rules."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from lowtide._torch_version import VERSION
from lowtide.phantom.dry import launch
from support.dry_process import call_dry

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3  # torch.nn.attention.SDPBackend
KIB = 1 << 10

# Capability, name, GiB, multiprocessors, KiB of shared memory that a block may have.
GPUS = {
    "a100-40": ((8, 0), "NVIDIA A100-SXM4-40GB", 39.39, 108, 163),
    "h100": ((9, 0), "NVIDIA H100 80GB HBM3", 79.11, 132, 227),
    "b200": ((10, 0), "NVIDIA B200", 178.35, 148, 227),
    "rtx4090": ((8, 9), "NVIDIA GeForce RTX 4090", 23.64, 128, 99),
}
ATTENTION = {
    # cuDNN's comes first from Hopper on, FlashAttention takes no mask, and of float32
    # only the memory-efficient one has kernels.
    "a100-40": {"half": FLASH, "mask": EFFICIENT, "float": EFFICIENT},
    "h100": {"half": CUDNN, "mask": CUDNN, "float": EFFICIENT},
    "b200": {"half": CUDNN, "mask": CUDNN, "float": EFFICIENT},
    "rtx4090": {"half": FLASH, "mask": EFFICIENT, "float": EFFICIENT},
}
# Of heads of 256: cuDNN has them on Hopper alone, from torch 2.12 on without dropout,
# and FlashAttention's backward with dropout does not fit the shared memory of Ada.
WIDE = {"a100-40": FLASH, "h100": CUDNN, "b200": FLASH, "rtx4090": EFFICIENT}
if VERSION >= (2, 12):
    WIDE["h100"] = FLASH


@triton.jit
def products(a, b, out, WIDTH: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr):
    rows = tl.arange(0, WIDTH)
    inner = tl.arange(0, DEPTH)
    total = tl.zeros((WIDTH, WIDTH), dtype=tl.float32)
    for step in tl.range(STEPS, num_stages=5):
        at = step * DEPTH + inner
        left = tl.load(a + rows[:, None] * DEPTH * STEPS + at[None, :])
        right = tl.load(b + at[:, None] * WIDTH + rows[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * WIDTH + rows[None, :], total)


def look() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    x, product = torch.empty(2, 64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.matmul(x, x, out=product)
    return {
        "workspace": torch.cuda.max_memory_allocated() - before,
        "torch": (
            (properties.major, properties.minor),
            properties.name,
            properties.total_memory,
            properties.multi_processor_count,
            properties.shared_memory_per_block_optin,
        ),
        "uuid": str(properties.uuid),
        "nvml": management_library(),
        "attention": {
            "half": attention(torch.bfloat16, 64),
            "mask": attention(torch.bfloat16, 64, masked=True),
            "float": attention(torch.float32, 64),
        },
        "wide": attention(torch.bfloat16, 256, dropout=0.1),
        "triton": triton.runtime.driver.active.utils.get_device_properties(0),
        "target": triton.runtime.driver.active.get_current_target().arch,
        "products": whether_products_fit(),
        "eight_bits": whether_eight_bits_multiply(),
    }


def attention(
    dtype: torch.dtype, width: int, *, masked: bool = False, dropout: float = 0.0
) -> int:
    q = torch.randn(2, 8, 256, width, device="cuda", dtype=dtype, requires_grad=True)
    mask = torch.ones(256, 256, device="cuda", dtype=torch.bool) if masked else None
    return int(torch._fused_sdp_choice(q, q, q, mask, dropout))


def management_library() -> dict[str, Any]:
    """As NVIDIA's Python package asks for it."""

    class Memory(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    count, handle, memory = ctypes.c_uint(), ctypes.c_void_p(), Memory()
    text = ctypes.create_string_buffer(96)
    major, minor, clock = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint()
    statuses = [
        nvml.nvmlInitWithFlags(0),
        nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)),
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)),
        nvml.nvmlDeviceGetHandleByIndex_v2(count.value - 1, ctypes.byref(handle)),
        nvml.nvmlDeviceGetCudaComputeCapability(
            handle, ctypes.byref(major), ctypes.byref(minor)
        ),
        nvml.nvmlDeviceGetClockInfo(handle, 1, ctypes.byref(clock)),
        nvml.nvmlDeviceGetUUID(handle, text, len(text)),
    ]
    uuid = text.value.decode()
    statuses.append(nvml.nvmlDeviceGetName(handle, text, len(text)))
    statuses.append(nvml.nvmlShutdown())
    none = nvml.nvmlDeviceGetHandleByIndex_v2(count.value, ctypes.byref(handle))
    return {
        "statuses": set(statuses),
        "no such device": none,
        "capability": (major.value, minor.value),
        "name": text.value.decode(),
        "uuid": uuid,
        "total": memory.total,
        "used": memory.used - torch.cuda.memory_reserved(),
        "held": held.nbytes <= memory.used,
        "megahertz": clock.value,
    }


def whether_products_fit() -> str:
    """Four or five stages, as Triton has it, of two blocks of 128 x 64 values, each of
    32 KiB."""
    a, b, out = torch.empty(3, 128, 128, device="cuda", dtype=torch.bfloat16)
    try:
        products[(1,)](a, b, out, 128, 64, 16)
    except triton.OutOfResources as error:
        return str(error)
    return "fit"


def whether_eight_bits_multiply() -> str:
    a = torch.empty(64, 64, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    try:
        torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16)
    except RuntimeError as error:
        return str(error)
    return "they do"


@pytest.fixture(scope="module", params=GPUS)
def gpu(request) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(gpu: str) -> dict[str, Any]:
    answers: dict[str, Any] = call_dry(look, machine=launch.Machine(gpu=gpu, devices=2))
    return answers


def test_properties(gpu, found):
    capability, name, gibibytes, multiprocessors, of_block = GPUS[gpu]
    *rest, memory = (found["torch"][i] for i in (0, 1, 3, 4, 2))
    assert rest == [capability, name, multiprocessors, of_block * KIB]
    assert memory / 2**30 == pytest.approx(gibibytes, abs=0.002)


def test_the_management_library_says_the_same(gpu, found):
    capability, name, *_ = GPUS[gpu]
    said = found["nvml"]
    assert said["statuses"] == {0}
    assert said["no such device"] == 2  # NVML_ERROR_INVALID_ARGUMENT
    assert (said["capability"], said["name"]) == (capability, name)
    assert said["total"] == found["torch"][2]
    assert (said["used"], said["held"]) == (0, True)
    assert found["uuid"] == "-".join(["01" * n for n in (4, 2, 2, 2, 6)])
    assert said["uuid"] == "GPU-" + found["uuid"].replace("01", "02")


def test_attention_is_torchs_choice_for_the_gpu(gpu, found):
    assert found["attention"] == ATTENTION[gpu]
    assert found["wide"] == WIDE[gpu]


def test_tritons_limits(gpu, found):
    (major, minor), _, _, multiprocessors, of_block = GPUS[gpu]
    assert found["target"] == 10 * major + minor
    assert found["triton"]["max_shared_mem"] == of_block * KIB
    assert found["triton"]["multiprocessor_count"] == multiprocessors
    if of_block >= 163:
        assert found["products"] == "fit"
    else:
        assert f"Hardware limit: {of_block * KIB}" in found["products"]


def test_cublas_gets_the_workspace_of_the_gpu(gpu, found):
    """By torch's rule 32 MiB on Hopper, from 2.12 on on Blackwell, too, and 8,320 KiB
    on others."""
    large = ((9, 0),) if VERSION < (2, 12) else ((9, 0), (10, 0))
    assert found["workspace"] == (32 << 20 if GPUS[gpu][0] in large else 8320 * KIB)


def test_products_of_eight_bits_need_ada_or_later(gpu, found):
    said = "they do" if GPUS[gpu][0] >= (8, 9) else "compute capability >= 9.0 or 8.9"
    assert said in found["eight_bits"]
