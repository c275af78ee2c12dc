"""Programs on torch's own CUDA build over the dry driver: whole training runs as others
write them, what they read of values nobody computed, and ``python -m lowtide phantom``.

Figures are those of an H100 that takes no memory itself.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide._torch_version import VERSION
from lowtide.phantom.dry import launch
from support import dry_programs, workspaces
from support.dry_process import run_dry

ROOT = Path(__file__).parents[3]
MIB, GIB = 1 << 20, 1 << 30
ALONE = ("resnet50", "hf_trainer", "top_k_experts", "compiled", "cuda_graph")
# What torch compiles with NVRTC is compiled.
ENVIRONMENT = {
    "PYTHONPATH": ":".join([*sys.path, str(ROOT / "examples")]),
    "USE_PYTORCH_KERNEL_CACHE": "0",
}
OF_EIGHT = (
    *("values", "operators", "fsdp2", "ddp", "lowtide_offload"),
    "sparse_products",
)


def run(
    *program: str, report: Path | None = None, status: int = 0, **machine: Any
) -> subprocess.CompletedProcess[str]:
    on = launch.Machine(**machine)
    settings = {"report": report, "status": status, "environment": ENVIRONMENT}
    return run_dry(*program, machine=on, **settings)


def programs(names: tuple[str, ...], **machine: Any) -> dict[str, dict[str, Any]]:
    done = run(dry_programs.__file__, *names, **machine)
    # torch says there what goes wrong in the observer, the driver what it lacks.
    assert "RecordFunction" not in done.stderr
    assert "lowtide: phantom" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return programs(ALONE)


@pytest.fixture(scope="module")
def of_eight() -> dict[str, dict[str, Any]]:
    return programs(OF_EIGHT, world=8)


@pytest.mark.slow
def test_resnet50_with_amp_and_channels_last(alone):
    found = alone["resnet50"]
    assert found["state"] == pytest.approx(2 * 25_557_032 * 4, rel=1e-3)
    held = 1722 * MIB + workspaces.kept(2)
    assert found["allocated"] == pytest.approx(held, abs=2 * MIB)


@pytest.mark.slow
def test_the_trainer_of_transformers(alone):
    found = alone["hf_trainer"]
    assert found["steps"] == dry_programs.STEPS
    # Weights, gradients and two moments in fp32, and the logits' gradient.
    assert found["allocated"] > 4 * found["parameters"]


@pytest.mark.slow
def test_top_k_experts_of_transformers(alone):
    found = alone["top_k_experts"]
    assert found["allocated"] > 4 * found["parameters"]


def test_every_mechanism_of_lowtide_together():
    script = ROOT / "tests/python/phantom/scripts/train_every_mechanism.py"
    printed = run(str(script), "fused", world=8).stdout
    assert "weight gradients: 6 fused, 1 exact\n" in printed
    (residual,) = (line for line in printed.splitlines() if line.startswith("residual"))
    # Of three blocks in three steps, 256 tokens of 512 bf16 values each.
    assert residual.split()[1:7] == ["offload", "9", "0", "B", "2.25", "MiB"]


def test_inductor_compiles_and_takes_less_than_eager(alone):
    found = alone["compiled"]
    if workspaces.KEPT:
        assert found["compiled"] < found["eager"]
    else:  # both are largest in a product, with its workspace
        assert found["compiled"] <= found["eager"]


def test_a_step_in_a_cuda_graph_has_a_pool_of_its_own(alone):
    assert alone["cuda_graph"]["pools"] == 2


def test_values_of_the_host_travel_and_others_let_training_go_on(of_eight):
    found = of_eight["values"]
    assert found["made"] == [3, 5]
    assert found["gathered"] == [3, 5] * 8
    assert found["written"] == 8  # by a kernel, of what the host made
    assert found["names"] == ["rank 0"] * 8
    assert found["computed"] == [1.0, False]
    assert found["nonzero"] == [64, 2]
    assert found["masked"] == [64]
    assert found["unique"] == 64
    assert found["loss scale steps"] == 1


def test_libraries_beside_cublas(of_eight):
    found = of_eight["operators"]
    assert found["fft"] == [64, 33]
    assert found["qr"] == [64, 64]
    assert found["several"] == [16, 16, 16]
    assert found["determinant"] == []
    # Four gates of inputs, states and two biases, in both layers.
    assert found["weights"] == 2 * 2 * (64 + 32 + 2) * 32 * 4
    assert found["projected"] == sum(
        4 * 32 * (inputs + 16 + 2) + 16 * 32 for inputs in (64, 16)
    )


def test_sparse_products(of_eight):
    found = of_eight["sparse_products"]
    assert (found["stored"], found["sparse"]) == (64, [64, 64])
    assert found["sampled"] == [64]
    # Half of the values and two bits for each of them.
    assert found["half of them"] == [128, 128]
    assert found["packed"] == 128 * 128 * (8 + 1) // 16
    assert found["gradient"] == [64, 64]


def test_fsdp2_and_ddp_over_torchs_own_nccl_group(of_eight):
    weights = 4 * 1024 * 1025 * 4
    assert of_eight["fsdp2"]["state"] == pytest.approx(3 * weights / 8, rel=1e-3)
    # cuBLASLt has its workspace from the operators before, where it is kept.
    kept = (1 << 20 if VERSION < (2, 12) else 0) + (4096 if workspaces.KEPT else 0)
    assert of_eight["fsdp2"]["allocated"] == 57_823_232 + kept
    # Parameters, and gradients as views of its buckets.
    assert of_eight["ddp"]["parameters"] == pytest.approx(weights, rel=1e-3)
    assert of_eight["ddp"]["allocated"] > 2 * weights


def test_lowtides_engine_with_activations_on_the_host(of_eight):
    found = of_eight["lowtide_offload"]
    assert found["pinned"] >= 2 * 512 * 1024 * 4  # two blocks' inputs at once


def test_a_save_in_the_background_copies_beside_the_step(tmp_path):
    script = Path(__file__).parent / "scripts" / "save_in_background.py"
    done = run(str(script), str(tmp_path / "it"), world=2)
    assert done.stdout.splitlines()[0] == "done", done.stderr


def test_a_step_on_a_device_is_undone_and_tried_again():
    script = Path(__file__).parent / "scripts" / "undone_step.py"
    done = run(str(script), world=2)
    assert done.stdout.splitlines()[0] == "done", done.stderr


def test_a_70b_model_made_on_the_meta_device_takes_no_memory_of_the_host():
    found = programs(("llama_70b",), world=256)["llama_70b"]
    assert found["elements"] == 70_553_706_496
    # Shards of weights and gradients; the host has 1 GiB of libraries.
    shards = 2 * 4 * found["elements"] / 256
    assert shards <= found["held"] < 1.01 * shards
    assert found["host"] < 1.5 * GIB < found["held"]


@pytest.mark.slow
def test_compiled_blocks_whose_hooks_gather():
    """What hears of a gather is no part of the compiled region that it is asked for in:
    the checkpoint would run another one again."""
    shape = "--config tiny --num-layers 1 --sequence 64 --world 8 --loss chunked:2"
    program = str(ROOT / "benchmarks/programs/llama_memory.py")
    done = run(program, "--compile", *shape.split(), world=8)
    assert "torch._dynamo" not in done.stderr


@pytest.mark.slow
def test_llama_8b_of_the_benchmarks_as_it_stands(tmp_path):
    """FSDP2 at world 8, in torch's own memory history, too; the stored figure."""
    rows = json.loads((ROOT / "benchmarks/results/torch_versions.json").read_text())
    quantity = "reserved, default segments, loss by chunks of tokens, torch {}.{}"
    stored = {r["quantity"]: r["value"] for r in rows["rows"] if r["system"] == "fsdp2"}
    expected = stored.get(quantity.format(*VERSION))
    if expected is None and VERSION < (2, 15):
        pytest.skip("torch_versions has no figure of this torch")
    report, snapshot = tmp_path / "report.json", tmp_path / "snapshot.pickle"
    program = ROOT / "benchmarks/programs/llama_memory.py"
    options = "--system fsdp2 --config 8b --world 8 --loss chunked:32"
    command = [sys.executable, "-W", "ignore", "-m", "lowtide", "phantom"]
    command += ["--world", "8", "--json", str(report), "--snapshot", str(snapshot)]
    command += ["--", str(program), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (device,) = json.loads(report.read_text())["devices"]
    assert round(device["reserved"] / GIB, 2) == expected
    peak = json.loads(done.stdout)["from_start"]
    assert peak["reserved"] == device["reserved"]
    history = pickle.loads(snapshot.read_bytes())
    (entries,) = filter(None, history["device_traces"])
    assert highest(entries) == peak["reserved"]


def highest(entries: list[dict[str, Any]]) -> int:
    """Bytes of segments at most, by torch's memory history."""
    now = peak = 0
    for entry in entries:
        sign = {"segment_alloc": 1, "segment_free": -1}.get(entry["action"], 0)
        now += sign * entry["size"]
        peak = max(peak, now)
    return peak


LOOK = """
import glob, os, sys, torch
assert "lowtide" not in sys.modules
print(sys.argv[1:], torch.cuda.device_count(), torch.cuda.get_device_name())
if torch.randn(4, device="cuda").sum() > 0:
    print("never")
held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
del held
torch.empty(4 << 20, dtype=torch.uint8, pin_memory=True)
torch.cuda._device_count_nvml()
files = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(*(file for file in files if "libcuda.so" in file or "libnvidia-" in file))
links = map(os.path.realpath, glob.glob("/proc/self/fd/*"))
print(*(link for link in links if "nvidia" in link))
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
"""


def test_a_program_as_it_stands(tmp_path, monkeypatch):
    """It imports nothing of lowtide; the report has what it read of values nobody
    computed, and peaks from before it counted anew. The machine's own driver, here one
    that cannot be loaded, is never reached."""
    for name in ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"):
        (tmp_path / name).write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "look.py").write_text(LOOK)
    report = tmp_path / "report.json"
    program = (str(tmp_path / "look.py"), "--lr", "1")
    done = run(*program, report=report, gpu="l40s", devices=2)
    assert done.stdout == "['--lr', '1'] 2 NVIDIA L40S\n\n\n"
    found = json.loads(report.read_text())
    (assumed,) = found["assumed"]
    assert assumed["what"] == "a truth value read back is False"
    assert assumed["where"] == f"{tmp_path / 'look.py'}:5"
    assert found["pinned"] >= 4 * MIB
    (device,) = found["devices"]
    assert device["allocated"] == 64 * MIB
    assert device["reserved"] == device["in_use"] == 66 * MIB


END = """
import atexit, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("program", end=" ")
{}
"""


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise ValueError('no data')", 1, "ValueError: no data\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
    ],
)
def test_a_program_ends_as_it_would_alone(tmp_path, end, status, error):
    (tmp_path / "end.py").write_text(END.format(end))
    done = run(str(tmp_path / "end.py"), status=status)
    assert done.stdout == "program thread\nat exit\n"
    assert done.stderr.endswith(error) and bool(done.stderr) == bool(error)
    files = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert files == files[:1] and all(str(tmp_path) in line for line in files)


def test_a_device_that_is_full_says_what_cuda_says(tmp_path):
    (tmp_path / "full.py").write_text(
        "import torch\ntorch.empty(2 << 30, dtype=torch.uint8, device='cuda')"
    )
    done = run(str(tmp_path / "full.py"), memory=GIB, status=1)
    assert "CUDA out of memory. Tried to allocate 2.00 GiB" in done.stderr
    assert "total capacity of 1024.00 MiB" in done.stderr


def test_cudnns_attention_has_the_workspace_of_a_gpu(tmp_path):
    """32 heads of queries, 8 or 32 of keys: what an H200 took for the first; the
    frontend's part is a gradient of the queries in fp32 and a number for each row."""
    (tmp_path / "attention.py").write_text(
        "import json, torch\n"
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        "from torch.nn.functional import scaled_dot_product_attention\n"
        "def of(heads):\n"
        "    q, k, v = (\n"
        "        torch.zeros(1, h, 8192, 128, dtype=torch.bfloat16, device='cuda',\n"
        "                    requires_grad=True) for h in (32, heads, heads))\n"
        "    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):\n"
        "        out = scaled_dot_product_attention(\n"
        "            q, k, v, is_causal=True, enable_gqa=True)\n"
        "    grad = torch.zeros_like(out)\n"
        "    torch.cuda.memory._record_memory_history(context=None)\n"
        "    out.backward(grad)\n"
        "    trace = torch.cuda.memory._snapshot()['device_traces'][0]\n"
        "    torch.cuda.memory._record_memory_history(enabled=None)\n"
        "    return max(e['size'] for e in trace if e['action'] == 'alloc')\n"
        "print(json.dumps([of(8), of(32)]))"
    )
    frontend = (32 * 8192 * 128 + 32 * 8192) * 4
    done = run(str(tmp_path / "attention.py"))
    assert json.loads(done.stdout) == [269_484_288, frontend + 256]


# A function of each library that nothing here has a use for, and what its library calls
# an error.
MISSING = {
    "cuGraphicsMapResources": 801,
    "cudaGraphicsMapResources": 801,
    "cublasSmatinvBatched": 15,
    "cublasLtMatrixTransform": 15,
    "cudnnMultiHeadAttnForward": 3000,
    "cufftExecZ2Z": 16,
    "cusolverDnSsygvd": 9,
    "cusparseGather": 10,
    "cusparseLtGetProperty": 10,
    "ncclCommShrink": 5,
}
if VERSION < (2, 15):  # which does without
    MISSING["curandGenerate"] = 999


def test_missing_functions_are_named(tmp_path):
    (tmp_path / "missing.py").write_text(
        "import ctypes, json\n"
        f"names = {list(MISSING)}\n"
        "here = ctypes.CDLL('libcuda.so.1')\n"
        "print(json.dumps({name: getattr(here, name)() for name in names}))"
    )
    report = tmp_path / "report.json"
    done = run(str(tmp_path / "missing.py"), report=report)
    assert json.loads(done.stdout) == MISSING
    for name in MISSING:
        assert f"got a call of {name}. Avoid what calls it" in done.stderr
    assert set(json.loads(report.read_text())["missing"]) == set(MISSING)


def test_what_is_no_machine_is_refused():
    with pytest.raises(ValueError, match="gpu: expected one of a100-40, .* got 'h300'"):
        launch.environment(launch.Machine(gpu="h300"))
    with pytest.raises(ValueError, match="rank: expected 0 <= rank < world = 2, got 2"):
        launch.environment(launch.Machine(world=2, rank=2))


def test_a_cpu_build_gets_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "DRIVER", tmp_path / "none.so")
    with pytest.raises(RuntimeError, match="expected a CUDA build of torch"):
        launch.environment(launch.Machine())
