"""Vision transformers that others measured on real GPUs, written after their
descriptions (published.py runs them)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from published_support import peaks, use_packages
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


def vit_l(
    precision: str = "fp32",
    batch: int = 64,
    accumulated: int = 1,
    optimizer: str = "adam",
    ranks: int = 1,
) -> dict[str, int]:
    """Fine-tuning of ViT-L/16; the loss and the logits of a batch live into the next.
    With more than one of ``ranks`` its layers are FSDP's, and checkpointed."""
    import torchvision

    model: Any = torchvision.models.vit_l_16()
    model.heads.head = nn.Linear(1024, 10)
    if ranks > 1:
        model = _sharded(model, torchvision.models.vision_transformer.EncoderBlock)
    model.to("cuda")
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    steps = {
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=5e-5),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.01),
    }[optimizer]()
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "16-mixed")
    mixed = {"16-mixed": torch.float16}.get(precision)
    for index in range(3 * accumulated):
        model.train()
        images = torch.randn(batch, 3, 224, 224).to("cuda")
        if precision == "bf16-true":
            images = images.to(torch.bfloat16)
        labels = torch.randint(0, 10, (batch,)).to("cuda")
        with torch.autocast("cuda", mixed, enabled=mixed is not None):
            logits = model(images)
        if mixed is not None:
            logits = logits.float()
        loss = F.cross_entropy(logits, labels) / accumulated
        if accumulated == 1:
            steps.zero_grad()
        scaler.scale(loss).backward()
        if index % accumulated == 0:
            scaler.step(steps)
            scaler.update()
            if accumulated > 1:
                steps.zero_grad()
        model.eval()
        with torch.no_grad():
            torch.argmax(logits, 1)
    return peaks()


def _sharded(model: nn.Module, layer: type[nn.Module]) -> nn.Module:
    dist.init_process_group("nccl")
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={layer}
    )
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        device_id=torch.device("cuda", 0),
        use_orig_params=True,
    )
    apply_activation_checkpointing(
        sharded, check_fn=lambda module: isinstance(module, layer)
    )
    return sharded


def vit_timm(
    model: str, batch: int, optimizer: str = "AdamW", **switches: int
) -> dict[str, int]:
    """Fine-tuning with 45 classes on images of 224 x 224. ``optimizer`` is torch's
    fused AdamW, one of torchao's, or ``offload`` of states, or of gradients too.
    ``switches``: bf16, or else autocast to it; checkpoint; compiled."""
    use_packages()
    import timm

    sized = {"img_size": 224} if "dinov2" in model else {}
    network: Any = timm.create_model(model, num_classes=45, **sized)
    bf16 = bool(switches.get("bf16"))
    if switches.get("checkpoint"):
        network.set_grad_checkpointing()
    if bf16:
        network.bfloat16()
    network.to("cuda")
    if switches.get("compiled"):
        network.compile(fullgraph=True)
    steps = _optimizer(optimizer, network)
    for _ in range(4):
        images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 45, (batch,))
        if bf16:
            images = images.bfloat16()
        with torch.autocast("cuda", torch.bfloat16, enabled=not bf16):
            loss = F.cross_entropy(network(images.to("cuda")), labels.to("cuda"))
        loss.backward()
        loss.item()
        steps.step()
        steps.zero_grad()
    return peaks()


def _optimizer(name: str, network: nn.Module) -> Any:
    fused = functools.partial(torch.optim.AdamW, fused=True)
    settings = {"lr": 1e-4, "weight_decay": 0}
    if name == "AdamW":
        return fused(network.parameters(), **settings)
    from torchao import optim

    if name.startswith("offload"):
        return optim.CPUOffloadOptimizer(
            network.parameters(),
            fused,
            offload_gradients=name == "offload_gradients",
            **settings,
        )
    return getattr(optim, name)(network.parameters(), **settings)
