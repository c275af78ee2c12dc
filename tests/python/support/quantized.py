"""Models with torchao's tensors as parameters, and what trains them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchao import quantize_
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.config import (
    MXFP8TrainingOpConfig,
    MXFP8TrainingRecipe,
)
from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor
from torchao.prototype.quantized_training import (
    bitnet_training,
    int8_mixed_precision_training,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from support.systems import get_system

DIM = 128


def blocks() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Tanh()) for _ in range(3))
    )


def bitnet() -> Any:
    model = blocks()
    quantize_(model, bitnet_training())
    return model


def int8() -> Any:
    model = blocks()
    quantize_(model, int8_mixed_precision_training())
    return model


def nf4() -> Any:
    """As QLoRA: the base is frozen, what is trained stands beside it."""
    model = blocks()
    for block in model:
        weight = to_nf4(block[0].weight.detach(), 64, 16)
        block[0].weight = nn.Parameter(weight, requires_grad=False)
        block.append(nn.Linear(DIM, DIM))
    return model


def mxfp8() -> Any:
    """Emulated, too; torchao converts models for a newer torch only."""
    model = blocks()
    recipe = MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL
    config = MXFP8TrainingOpConfig.from_recipe(recipe)
    for block in model:
        weight = MXFP8TrainingWeightWrapperTensor(block[0].weight.detach(), config)
        block[0].weight = nn.Parameter(weight)
    return model


def float8() -> Any:
    model = blocks()
    # Emulated: the products of float8 that a CPU lacks.
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    return model


MODELS = {one.__name__: one for one in (bitnet, int8, nf4, mxfp8, float8)}

# It multiplies nothing but bf16.
SETTINGS = {"mxfp8": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}}


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss: torch.Tensor = (
        model(torch.randn(32, DIM, generator=generator)).square().mean()
    )
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, foreach=False)


def wrap(system_name: str, model: Any, **settings: Any) -> Any:
    system = get_system(system_name)
    for module in (*model, model):
        system.fully_shard(module, **settings)
    return model
