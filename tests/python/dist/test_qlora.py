"""Adapters on a frozen quantized base: the bits of FSDP2.

In NF4 as recipes of QLoRA have it: sharded on the meta device, filled from a full state
dict by assignment, trained with blocks checkpointed, saved in full. Without operators
to split it the base stays whole; or the layer makes it out of what was gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import (
    NF4Tensor,
    linear_nf4,
    to_nf4,
)

import lowtide
from support.recorder import Record, Recorder, assert_trains_as_fsdp2
from support.systems import get_system

DIM, HIDDEN, RANK, WORDS, LAYERS = 128, 256, 4, 32, 3
STEPS, MICROBATCHES = 3, 2
NF4 = {"block_size": 32, "scaler_block_size": 16}


class LoRALinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        base = nn.Linear(inputs, outputs, bias=False).weight
        self.weight = nn.Parameter(to_nf4(base.detach(), **NF4), requires_grad=False)
        self.lora_a = nn.Linear(inputs, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_nf4(x, self.weight) + 2.0 * self.lora_b(self.lora_a(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM, bias=False)
        self.up, self.down = LoRALinear(DIM, HIDDEN), LoRALinear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.output = nn.Linear(DIM, WORDS, bias=False)
        for name, p in self.named_parameters():
            p.requires_grad_("lora_" in name)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def full_state() -> dict[str, torch.Tensor]:
    """Not quantized, as a checkpoint has it."""
    generator = torch.Generator().manual_seed(0)
    sizes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (WORDS, DIM),
        "output.weight": (WORDS, DIM),
    }
    for i in range(LAYERS):
        sizes[f"layers.{i}.norm.weight"] = (DIM,)
        for name, outputs, inputs in (("up", HIDDEN, DIM), ("down", DIM, HIDDEN)):
            sizes[f"layers.{i}.{name}.weight"] = (outputs, inputs)
    return {
        name: torch.randn(size, generator=generator, dtype=torch.bfloat16) / 8
        for name, size in sizes.items()
    }


def load(model: nn.Module, offload: bool) -> None:
    """By assignment: what is on the meta device takes no copy."""
    there = model.state_dict()
    state: dict[str, nn.Parameter] = {}
    for name, value in full_state().items():
        old = there[name]
        assert isinstance(old, DTensor)
        if isinstance(old._local_tensor, NF4Tensor):
            whole = to_nf4(value, **NF4)
            rows = torch.chunk(whole, old.device_mesh.size(), dim=0)[dist.get_rank()]
            local = whole.new_zeros(rows.size())
            local.copy_(rows)
            meta = TensorMeta(old.shape, old.stride(), old.dtype)
            spec = DTensorSpec(old.device_mesh, old.placements, tensor_meta=meta)
            sharded = DTensor(local, spec, requires_grad=False)
        else:
            sharded = distribute_tensor(value, old.device_mesh, old.placements)
        state[name] = nn.Parameter(sharded.cpu() if offload else sharded, False)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not unexpected and all("lora_" in name for name in missing)


def make(system_name: str, how: str) -> Any:
    system = get_system(system_name)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model: Any = Model()
    finally:
        torch.set_default_dtype(torch.float32)
    settings: dict[str, Any] = {}
    if how == "offloaded":
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for i, layer in enumerate(model.layers):
        if how == "regions" and system_name == "lowtide":
            lowtide.checkpoint(layer)
        else:
            model.layers[i] = layer = checkpoint_wrapper(layer)
        system.fully_shard(layer, **settings)
    system.fully_shard(model, **settings)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.lora_a.to_empty(device="cpu")
            module.lora_b.to_empty(device="cpu")
    load(model, how == "offloaded")
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.1)
    return model


def gathered(p: DTensor) -> torch.Tensor:
    """NF4 has no all-gather as an operator: its hooks are asked."""
    local: Any = p._local_tensor
    if not isinstance(local, NF4Tensor):
        return p.full_tensor()
    parts, metadata = local.fsdp_pre_all_gather(p.device_mesh)
    whole = []
    for part in parts:
        size = (part.shape[0] * p.device_mesh.size(), *part.shape[1:])
        whole.append(torch.empty(size, dtype=part.dtype))
        dist.all_gather_into_tensor(whole[-1], part)
    full, _ = local.fsdp_post_all_gather(tuple(whole), metadata, local.dtype)
    return full.to(full.dtype)


def train(system_name: str, how: str) -> Record:
    model = make(system_name, how)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=0.01, foreach=False)
    record = Recorder()
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            seed = 100 * step + 10 * microbatch + dist.get_rank()
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, WORDS, (2, 9), generator=generator)
            logits = model(tokens[:, :-1]).float()
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
            )
            loss.backward()
            record.add("loss", loss)
        for p in adapters:  # of a sum over the tokens of all ranks
            p.grad.mul_(dist.get_world_size() / 64)
        norm = torch.nn.utils.clip_grad_norm_(adapters, 1.0, foreach=False)
        record.add("norm", norm.full_tensor())
        for name, p in model.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "")
            record.add(f"{name}.grad", p.grad)
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.state_dict().items():
        record.add(name, gathered(p))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    for name, values in state.get("state", {}).items():
        for key, value in values.items():
            record.add(f"{name}.{key}", value)
    return record.values


@pytest.mark.parametrize("how", ["regions", "offloaded"])
def test_training_equals_fsdp2(pool_of, how):
    assert_trains_as_fsdp2(pool_of(2), train, how)


class Codes(nn.Parameter):
    """As a library's: how they are read is known to the layer alone."""


class Decoded(torch.autograd.Function):
    """Keeps the codes as no saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: Codes) -> torch.Tensor:
        ctx.codes = codes
        return x @ codes.view(DIM, DIM).T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient @ ctx.codes.view(DIM, DIM), None


class Coded(nn.Module):
    """Registers its codes anew in each forward, over the same bytes, as bitsandbytes
    does where sharding has lost their class."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(DIM * DIM, 1) / DIM**0.5
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, Codes):
            codes = torch.Tensor._make_subclass(Codes, self.weight.data)
            codes.data = self.weight.data
            self.weight = codes
        return Decoded.apply(x, self.weight)


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(DIM, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.lora_b(self.lora_a(x)))


def train_adapted(system_name: str, base: str) -> Record:
    system = get_system(system_name)
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(make_base(base)) for _ in range(LAYERS)))
    whole = {p for p in model.parameters() if type(p.detach()) is not torch.Tensor}
    for layer in model:
        if base == "coded":
            system.fully_shard(layer.base)
        system.fully_shard(layer, ignored_params=whole)
    system.fully_shard(model, ignored_params=whole)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, foreach=False)
    record = Recorder()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, DIM, generator=generator)).square().mean()
        loss.backward()
        record.add("loss", loss)
        for p in trained:
            record.add("gradient", p.grad)
        optimizer.step()
        optimizer.zero_grad()
    return record.values


def make_base(kind: str) -> nn.Module:
    if kind == "coded":
        return Coded()
    base = nn.Linear(DIM, DIM, bias=False).requires_grad_(False)
    quantize_(base, Int8WeightOnlyConfig())
    return base


@pytest.mark.parametrize("base", ["coded", "int8"])
def test_another_base_equals_fsdp2(pool_of, base):
    assert_trains_as_fsdp2(pool_of(2), train_adapted, base)


def shard_int8() -> None:
    lowtide.fully_shard(make_base("int8"))


def test_a_base_that_can_not_be_split_is_refused(pool_of):
    for outcome in pool_of(2).outcomes(shard_int8):
        assert outcome.error.startswith(
            "lowtide: Linear.weight: expected a Int8Tensor that can be split, as FSDP2 "
            "splits it, got: "
        )
        assert "Pass it in ignored_params" in outcome.error
