"""Training programs as others write them, one after the other in one process over the
dry driver: ``dry_programs.py NAME...`` prints what each took, as JSON. Started as one
rank of a world by tests/python/phantom/test_dry_programs.py.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lowtide.phantom.dry import driver

STEPS = 3


def resnet50() -> dict[str, Any]:
    """torchvision's reference training: AMP with GradScaler, channels_last, SGD."""
    import torchvision

    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(STEPS):
        images = torch.randn(32, 3, 224, 224, device="cuda")
        images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(0, 1000, (32,), device="cuda")
        with torch.autocast("cuda"):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    return {"state": num_bytes(model.parameters(), momenta)}


def hf_trainer() -> dict[str, Any]:
    """transformers' Trainer on a small Llama: bf16, checkpointing, clipping, AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    data = [
        dict.fromkeys(("input_ids", "labels"), torch.randint(0, 32000, (256,)))
        for _ in range(4 * STEPS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=STEPS,
            bf16=True,
            gradient_checkpointing=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
        )
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
        result = trainer.train()
    parameters = list(trainer.model.parameters())
    assert next(iter(parameters)).is_cuda
    return {"steps": result.global_step, "parameters": num_bytes(parameters)}


def top_k_experts() -> dict[str, Any]:
    """Mixtral from transformers: a router's top two of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    model = MixtralForCausalLM(config).cuda().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        tokens = torch.randint(0, 1024, (2, 128), device="cuda")
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"parameters": num_bytes(model.parameters())}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def compiled() -> dict[str, Any]:
    """torch.compile: inductor, Triton and ptxas are the real ones."""
    model = nn.Sequential(Block(256), Block(256)).cuda()
    program = torch.compile(model)
    x = torch.randn(4096, 256, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    model(x).sum().backward()
    eager = torch.cuda.max_memory_allocated()
    model.zero_grad()
    program(x).sum().backward()  # compiles
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    program(x).sum().backward()
    return {"eager": eager, "compiled": torch.cuda.max_memory_allocated()}


def cuda_graph() -> dict[str, Any]:
    """A whole step in a graph, as torch.cuda.graphs' page writes it."""
    return captured(Block(256).cuda())


def sharded_cuda_graph() -> dict[str, Any]:
    """The same of units, each checkpointed."""
    from lowtide import ActivationPolicy, checkpoint, fully_shard

    model = nn.Sequential(*(Block(256) for _ in range(3))).cuda()
    for block in model:
        checkpoint(block, ActivationPolicy())
        fully_shard(block)
    return captured(fully_shard(model))


def captured(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    x = torch.randn(64, 256, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).sum().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    pools = {
        tuple(segment["segment_pool_id"])
        for segment in torch.cuda.memory._snapshot()["segments"]
    }
    return {"pools": len(pools)}


def values() -> dict[str, Any]:
    """What the host made is read back as it was, from other ranks too; what kernels
    would have computed goes on."""
    made = torch.tensor([3, 5], device="cuda")
    gathered = torch.empty(2 * dist.get_world_size(), dtype=made.dtype, device="cuda")
    dist.all_gather_into_tensor(gathered, made)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, f"rank {dist.get_rank()}")
    written = torch.tensor([7, 7], device="cuda")
    written += 1
    freed = torch.tensor([2.5], device="cuda")
    del freed  # its memory is the sum's
    computed = torch.randn(8, 8, device="cuda")
    return {
        "made": made.clone().tolist(),
        "gathered": gathered.tolist(),
        "names": names,
        "written": written[0].item(),
        "computed": [computed.sum().item(), bool(computed.sum() > 0)],
        "nonzero": list((computed > 0).nonzero().shape),
        "masked": list(computed[computed > 0].shape),
        "unique": torch.unique(computed).numel(),
        "loss scale steps": scaled_step(),
    }


def scaled_step() -> int:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.AdamW([weight])
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    return len(optimizer.state)


def operators() -> dict[str, Any]:
    """Of libraries beside cuBLAS: cuDNN's graphs and RNNs, cuFFT, cuSOLVER."""
    x = torch.randn(64, 64, device="cuda")
    heads = [
        torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        F.scaled_dot_product_attention(*heads, is_causal=True).sum().backward()
    return {
        "fft": list(torch.fft.rfft(x).shape),
        "qr": list(torch.linalg.qr(x)[0].shape),
        "several": list(torch.linalg.qr(x.view(16, 16, 16))[0].shape),
        # By a kernel that torch has NVRTC compile here.
        "determinant": list(torch.linalg.det(x).shape),
        "weights": recurrent(bidirectional=True),
        "projected": recurrent(proj_size=16),
    }


def recurrent(**settings: Any) -> int:
    lstm = nn.LSTM(64, 32, num_layers=2, device="cuda", **settings)
    lstm(torch.randn(10, 4, 64, device="cuda"))[0].sum().backward()
    return sum(p.grad.numel() for p in lstm.parameters())


def sparse_products() -> dict[str, Any]:
    """Of cuSPARSE and cuSPARSELt."""
    x = torch.randn(64, 64, device="cuda")
    rows = torch.eye(64, device="cuda").to_sparse_csr()
    pairs = torch.tensor([0, 0, 1, 1], device="cuda").tile(128, 32).half()
    halved = torch.sparse.to_sparse_semi_structured(pairs)
    weights = nn.Parameter(x.relu().to_sparse())
    torch.sparse.mm(weights, x).sum().backward()
    return {
        "stored": rows.values().numel(),
        "sparse": list((rows @ x).shape),
        "sampled": list(torch.sparse.sampled_addmm(rows, x, x).values().shape),
        "half of them": list(F.linear(x.half().tile(2, 2), halved).shape),
        "packed": halved.packed.numel(),
        "gradient": list(weights.grad.shape),
    }


# -- one rank of a world, over torch's own ProcessGroupNCCL ---------------------------


def layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1024, 1024, device="cuda") for _ in range(count)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp2() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    moments = [
        moment.to_local()
        for state in optimizer.state.values()
        for moment in (state["exp_avg"], state["exp_avg_sq"])
    ]
    own = [parameter.to_local() for parameter in model.parameters()]
    return {"state": num_bytes(own, moments)}


def llama_70b() -> dict[str, Any]:
    """Made on the meta device; a step of it, without its optimizer's states."""
    from torch.distributed.fsdp import fully_shard

    from llama import CONFIGS, Llama
    from lowtide.planning.build import most_resident

    with torch.device("meta"):
        model = Llama(CONFIGS["70b"])
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cuda")
    model(torch.zeros(1, 64, dtype=torch.long, device="cuda")).sum().backward()
    own = [parameter.to_local() for parameter in model.parameters()]
    return {
        "elements": sum(parameter.numel() for parameter in model.parameters()),
        "held": num_bytes(own, [p.grad.to_local() for p in model.parameters()]),
        "host": most_resident(),
    }


def ddp() -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    module = layers()
    model = DistributedDataParallel(module)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    return {"parameters": num_bytes(module.parameters())}


def lowtide_offload() -> dict[str, Any]:
    """lowtide's engine, whose blocks' inputs wait on the host for backward."""
    from lowtide import ActivationPolicy, wrap

    model = nn.Sequential(*(Block(1024) for _ in range(4))).cuda()
    wrap(model, activations=ActivationPolicy(offload=("input",)))
    optimizer = torch.optim.AdamW(model.parameters())
    waits = driver.host_waits()
    for _ in range(STEPS):
        x = torch.randn(512, 1024, device="cuda", requires_grad=True)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"waits": driver.host_waits() - waits, "pinned": driver.peak_pinned()}


def look_at_shared(connection: Any) -> None:
    """In a process that gets a tensor of another one's."""
    tensor = connection.recv()
    found = {
        "shape": tuple(tensor.shape),
        "device": str(tensor.device),
        "in use": driver.peak_memory(0),
    }
    del tensor
    connection.send(found)


# -- all of them ---------------------------------------------------------------------


def num_bytes(*groups: Any) -> int:
    """As the allocator counts: blocks of 512 bytes, storages once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for group in groups
        for tensor in group
        if tensor.is_cuda
    }
    return sum((size + 511) // 512 * 512 for size in storages.values())


def measured(program: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = program()
    return found | {
        "allocated": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved(),
    }


def run(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if "WORLD_SIZE" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    for name in names:
        yield name, measured(globals()[name])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    print(json.dumps(dict(run(sys.argv[1:]))))
