"""Trains the model of a file that offers ``plan_model``; docs/plan.md."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lowtide import api, losses, policies
from lowtide._sharding.blocks import decide
from lowtide.planning.request import ModelFile
from lowtide.planning.script import require_file

_LOSS_CHUNKS = 8


def train_model_file(
    program: ModelFile, num_steps: int, trained: Callable[[nn.Module], None]
) -> None:
    """``trained`` hears of the model, before the first step."""
    _check_loss(program)
    dist.init_process_group("nccl")
    file = load(program.path)
    with torch.device("meta"):
        model = _model_of(file, program)
        head = getattr(file, "PLAN_HEAD", None)
        if not hasattr(file, "plan_step"):
            model = LanguageModel(model, _head(model, head, program), program.loss)
    blocks = [unit.module for unit in decide(model, set()).units if unit.is_block]
    if program.checkpoint != "none":
        for block in blocks:
            _checkpoint(block, selective=program.checkpoint == "selective")
    sharded = _parallel(model, blocks, program)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3, fused=True)
    trained(sharded)
    step = getattr(file, "plan_step", _language_model_step)
    for _ in range(num_steps):
        for microbatch in range(program.microbatches):
            if program.microbatches > 1 and program.system != "ddp":
                last = microbatch == program.microbatches - 1
                sharded.set_requires_gradient_sync(last)
            loss = step(sharded, program.batch, program.sequence)
            loss.backward()
            del loss
        nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def load(path: str) -> ModuleType:
    require_file(path)
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "plan_model"):
        raise ValueError(
            f"lowtide: plan: expected a function plan_model(config, sequence) in "
            f"{path}, got none. Add it (docs/plan.md), or run a training script with "
            f"`python -m lowtide plan -- {path}`."
        )
    return module


def _model_of(file: ModuleType, program: ModelFile) -> Any:
    try:
        return file.plan_model(program.config, program.sequence)
    except KeyError as error:
        if error.args != (program.config,):
            raise
        got = "none" if program.config is None else repr(program.config)
        raise ValueError(
            "lowtide: plan --config: expected a name that plan_model knows, got "
            f"{got}. Pass one of those in {program.path}."
        ) from error


def _check_loss(program: ModelFile) -> None:
    if program.loss == "vocabulary" and program.system == "fsdp2":
        raise ValueError(
            "lowtide: plan --loss vocabulary: expected --system lowtide or ddp, got "
            "fsdp2, whose head is gathered by its own forward only. Choose "
            "--loss chunked."
        )


class LanguageModel(nn.Module):
    """Tokens [batch, sequence] and targets of the same shape to the mean loss. The
    model's head, if it is known, is applied beside the loss."""

    def __init__(self, model: nn.Module, head: nn.Module | None, loss: str) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self._loss = loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model(tokens)
        if self._loss == "plain":
            return self._sum(hidden, targets) / targets.numel()
        if self._loss == "vocabulary":
            assert isinstance(self.head, nn.Linear)
            return losses.linear_cross_entropy(hidden, self.head, targets)
        pairs = zip(
            hidden.chunk(_LOSS_CHUNKS, 1), targets.chunk(_LOSS_CHUNKS, 1), strict=True
        )
        parts = [checkpoint(self._sum, *pair, use_reentrant=False) for pair in pairs]
        return torch.stack(parts).sum() / targets.numel()

    def _sum(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(hidden) if self.head is not None else hidden
        return F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
        )


def _head(model: nn.Module, name: str | None, program: ModelFile) -> nn.Module | None:
    if name is not None:
        head: nn.Module = model.get_submodule(name)
        if program.loss == "vocabulary" and not _is_plain_linear(head):
            raise ValueError(
                "lowtide: plan --loss vocabulary: expected PLAN_HEAD to name an "
                f"nn.Linear without bias, got {name!r}. Choose --loss chunked."
            )
        model.set_submodule(name, nn.Identity())
        return head
    if program.loss != "plain":
        raise ValueError(
            f"lowtide: plan --loss {program.loss}: expected PLAN_HEAD, the name of the "
            f"output projection, in {program.path}, got none. Add it (docs/plan.md)."
        )
    return None


def _is_plain_linear(head: nn.Module) -> bool:
    return isinstance(head, nn.Linear) and head.bias is None


def _language_model_step(model: nn.Module, batch: int, sequence: int) -> Tensor:
    tokens = torch.zeros(batch, sequence + 1, dtype=torch.long, device="cuda")
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


# -- checkpointing -------------------------------------------------------------------


def _checkpoint(block: nn.Module, *, selective: bool) -> None:
    context: dict[str, Any] = {}
    if selective:
        # Counts begin anew with each forward.
        context["context_fn"] = lambda: create_selective_checkpoint_contexts(
            _keep_every_other_matmul()
        )
    forward = block.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    block.forward = checkpointed


_KEPT = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_every_other_matmul() -> Callable[..., CheckpointPolicy]:
    """Attention and every second matrix product are kept, the rest is made again."""
    counts = {False: 0, True: 0}  # by whether it is the recompute

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op == torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        else:
            keep = op in _KEPT
        if keep:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


# -- parallelism ---------------------------------------------------------------------


def _parallel(model: nn.Module, blocks: list[nn.Module], program: ModelFile) -> Any:
    if program.system == "ddp":
        model.to_empty(device="cuda")
        return _AutocastDdp(model)
    if program.system == "lowtide":
        shard: Callable[..., Any] = api.fully_shard
        policy: Any = policies.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        shard = fully_shard
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    settings = {
        "mesh": init_device_mesh("cuda", (dist.get_world_size(),)),
        "mp_policy": policy,
    }
    for block in blocks:
        shard(block, **settings)
    for module in _ends(model, blocks):
        # The head is used last in forward and first in backward.
        stays = isinstance(module, nn.Linear)
        shard(module, **settings, reshard_after_forward=not stays)
    shard(model, **settings)
    model.to_empty(device="cuda")
    if program.loss == "vocabulary":
        losses.stream_rows(model.head)  # type: ignore[arg-type]
    return model


def _ends(model: nn.Module, blocks: list[nn.Module]) -> Iterator[nn.Module]:
    """Embedding, last norm and head: children without blocks inside."""
    for child in model.children():
        if child in blocks or not any(True for _ in child.parameters()):
            continue
        if any(module in blocks for module in child.modules()):
            yield from _ends(child, blocks)
        else:
            yield child


class _AutocastDdp(nn.parallel.DistributedDataParallel):
    """fp32 parameters, bf16 compute."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(*args, **kwargs)
