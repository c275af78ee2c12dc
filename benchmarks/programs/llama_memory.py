"""Peak bytes of training steps of a Llama on CUDA, as JSON. One process is one rank,
rank 0; the others are not there (stage.start).

    python -m lowtide phantom --world 8 -- \\
        llama_memory.py --system lowtide --config 8b --world 8 [...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from stage import peaks, start
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from llama import CONFIGS, Llama, LlamaConfig

SYSTEMS = ("lowtide", "fsdp2", "fsdp1")
# The first step makes the optimizer's state, the second is the first of its kind.
NUM_STEPS = 3
BF16, FP32 = torch.bfloat16, torch.float32
aten = torch.ops.aten
# What selective checkpointing keeps: attention, and every second product.
KEPT = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.set_defaults(device="cuda")  # bits.py has an option
    parser.add_argument("--system", choices=SYSTEMS, default="lowtide")
    parser.add_argument("--config", choices=CONFIGS, default="8b")
    parser.add_argument("--num-layers", type=int, help="instead of the config's")
    parser.add_argument("--vocab-size", type=int, help="instead of the config's")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument(
        "--replicas", type=int, default=1, help="of the shards (HSDP), on a 2-D mesh"
    )
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="full")
    parser.add_argument(
        "--loss",
        default="plain",
        help="plain, chunked:N (torch), tokens or vocabulary (lowtide.losses)",
    )
    parser.add_argument(
        "--units",
        choices=("root", "split"),
        default="split",
        help="embedding and head in the root's unit, or units of their own",
    )
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument(
        "--reduce-every", action="store_true", help="microbatch, not the last only"
    )
    parser.add_argument("--expandable", action="store_true")
    parser.add_argument("--gradient-budget", type=int, help="bytes of lowtide's ring")
    parser.add_argument("--compile", action="store_true", help="each block")
    parser.add_argument(
        "--muon", choices=("lowtide", "torch"), help="for the blocks' matrices"
    )
    parser.add_argument(
        "--in-backward",
        choices=("unclipped", "exact", "late"),
        help="the optimizer steps there; clipped so, by norm 1",
    )
    parser.add_argument(
        "--parameters-on-host", action="store_true", help="CPUOffloadPolicy"
    )
    parser.add_argument("--whole-embedding", action="store_true", help="no rows")
    parser.add_argument("--gather-embedding-in-backward", action="store_true")
    parser.add_argument("--states-on-host", action="store_true", help="the optimizer's")
    parser.add_argument(
        "--step-on-device",
        choices=("host", "device"),
        help="of parameters on the host; where states are between steps",
    )
    parser.add_argument(
        "--gather-at-once",
        action="store_true",
        help="in a block's backward, the next one",
    )
    return parser


# -- the model --------------------------------------------------------------------


def no_checkpoint(layer: nn.Module, x: Tensor, rope: Tensor) -> Tensor:
    return layer(x, rope)


def full_checkpoint(layer: nn.Module, x: Tensor, rope: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer, x, rope, use_reentrant=False)


def selective_checkpoint(layer: nn.Module, x: Tensor, rope: Tensor) -> Tensor:
    """As torchtitan's: attention's output and every second product are kept."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    num_products = {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is aten.mm.default:
            num_products[context.is_recompute] += 1
            keep = num_products[context.is_recompute] % 2 == 1
        else:
            keep = op in KEPT
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(layer, x, rope, use_reentrant=False, context_fn=contexts)


def offloaded_checkpoint(layer: nn.Module, x: Tensor, rope: Tensor) -> Tensor:
    """lowtide's, whose blocks' inputs wait in host memory."""
    from lowtide import tag

    return layer(tag(x, "residual"), rope)


CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "none": no_checkpoint,
    "selective": selective_checkpoint,
    "full": full_checkpoint,
    "offloaded": offloaded_checkpoint,
}


class LlamaWithLoss(Llama):
    """Tokens and targets to the loss, so that the head and the loss may fuse."""

    def __init__(self, config: LlamaConfig, checkpoint: str, loss: str) -> None:
        super().__init__(config)
        self.run_layer = CHECKPOINTS[checkpoint]
        self.loss_form = loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        rope = self.rope[: tokens.shape[1]]
        for layer in self.layers:
            x = self.run_layer(layer, x, rope)
        x = self.norm(x)
        if self.loss_form == "plain":
            logits = self.output(x).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if self.loss_form.startswith("chunked:"):
            return self.chunked_loss(x, targets, int(self.loss_form.split(":")[1]))
        from lowtide.losses import linear_cross_entropy

        return linear_cross_entropy(x, self.output, targets, chunking=self.loss_form)

    def chunked_loss(self, x: Tensor, targets: Tensor, num_chunks: int) -> Tensor:
        """Chunks of tokens, each checkpointed: logits of one chunk at a time."""
        from torch.utils.checkpoint import checkpoint

        def part(x: Tensor, targets: Tensor) -> Tensor:
            logits = self.output(x).float().flatten(0, 1)
            return F.cross_entropy(logits, targets.flatten(), reduction="sum")

        pieces = zip(x.chunk(num_chunks, 1), targets.chunk(num_chunks, 1), strict=True)
        losses = [checkpoint(part, *piece, use_reentrant=False) for piece in pieces]
        hold_for_chunks(self.output, losses[0])
        return torch.stack(losses).sum() / targets.numel()


def hold_for_chunks(head: nn.Module, first_loss: Tensor) -> None:
    """FSDP2 by itself gathers a head that is a unit again for each chunk's backward.
    Here it stays up to that of the first chunk, the last to run; allocated bytes peak
    where they did."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(head, FSDPModule) and first_loss.requires_grad:
        head.set_reshard_after_backward(False)
        first_loss.register_hook(lambda _: head.set_reshard_after_backward(True))


def build(args: argparse.Namespace, device: str = "meta") -> nn.Module:
    config = replace(CONFIGS[args.config], max_seq_len=args.sequence)
    if args.num_layers is not None:
        config = replace(config, num_layers=args.num_layers)
    if args.vocab_size is not None:
        config = replace(config, vocab_size=args.vocab_size)
    with torch.device(device):
        model = LlamaWithLoss(config, args.checkpoint, args.loss)
    if args.checkpoint == "offloaded":
        from lowtide import ActivationPolicy, checkpoint

        for layer in model.layers:
            checkpoint(layer, ActivationPolicy(offload=["residual"]))
    if args.compile:
        for layer in model.layers:
            layer.compile(fullgraph=True)
    return model


# -- the systems ------------------------------------------------------------------


def shard_by_unit(model: Any, args: argparse.Namespace) -> nn.Module:
    if args.system == "lowtide":
        from lowtide import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    else:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            fully_shard,
        )
    settings: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(BF16, FP32)}
    if args.parameters_on_host:
        settings["offload_policy"] = CPUOffloadPolicy(args.device == "cuda")
    if args.replicas > 1:
        from torch.distributed.device_mesh import init_device_mesh

        shape = (args.replicas, args.world // args.replicas)
        names = ("replicate", "shard")
        settings["mesh"] = init_device_mesh(args.device, shape, mesh_dim_names=names)
    shard = partial(fully_shard, **settings)
    for layer in model.layers:
        shard(layer)
    if args.units == "split":
        shard(model.tok_embeddings)
        # The head's backward follows its forward; with chunks it is used again.
        if args.loss == "plain":
            shard([model.norm, model.output], reshard_after_forward=False)
        elif args.loss == "vocabulary" and args.system == "lowtide":
            shard(model.output)
        else:
            shard(model.output, reshard_after_forward=False)
    shard(model)
    model.to_empty(device="cpu" if args.parameters_on_host else args.device)
    model.rope = model.rope.to(args.device)
    if args.system == "lowtide" and args.loss == "vocabulary":
        from lowtide.losses import stream_rows

        stream_rows(model.output)
    return model


def shard_flat(model: Any, args: argparse.Namespace) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.layers[0])}),
        mixed_precision=MixedPrecision(BF16, FP32),
        device_id=torch.device("cuda", 0),
        param_init_fn=lambda m: m.to_empty(device="cuda", recurse=False),
        use_orig_params=True,
        limit_all_gathers=True,
    )


WRAP = {
    "lowtide": shard_by_unit,
    "fsdp2": shard_by_unit,
    "fsdp1": shard_flat,
}


def set_sync(model: Any, sync: bool) -> Any:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(sync)
        return torch.autograd.set_grad_enabled(True)
    return torch.autograd.set_grad_enabled(True) if sync else model.no_sync()


def tune(model: nn.Module, args: argparse.Namespace) -> None:
    """lowtide's levers one by one, once there is a root."""
    from lowtide._sharding.unit import unit_state

    state = unit_state(model)
    if state is None or state.root is None:
        return
    if args.gradient_budget is not None:
        state.root.gradient_budget = args.gradient_budget
    if args.gather_at_once:
        for below, above in pairwise(model.layers):  # type: ignore[arg-type]
            above.set_modules_to_backward_prefetch([below])
    if args.gather_embedding_in_backward:
        embedding = unit_state(model.tok_embeddings)  # type: ignore[arg-type]
        assert embedding is not None
        embedding.settings.leaf_module = False


# -- the optimizer ----------------------------------------------------------------


class Both:
    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def with_muon(model: Any, name: str) -> Both:
    import lowtide

    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    those = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in those]
    muon = {"lowtide": lowtide.Muon, "torch": torch.optim.Muon}[name]
    return Both(muon(matrices), torch.optim.AdamW(others, fused=True))


def make_optimizer(
    model: nn.Module, args: argparse.Namespace
) -> torch.optim.Optimizer | Both:
    if args.muon is not None:
        return with_muon(model, args.muon)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if args.states_on_host:
        from lowtide import offload_states

        offload_states(optimizer)
    if args.step_on_device is not None:
        from lowtide import step_on_device

        step_on_device(optimizer, states=args.step_on_device)
    if args.in_backward is None:
        return optimizer
    from lowtide import optimize_in_backward

    clips = args.in_backward != "unclipped"
    how: dict[str, Any] = {"max_norm": 1.0, "clip": args.in_backward} if clips else {}
    return optimize_in_backward(model, optimizer, **how)


def clip(model: Any, args: argparse.Namespace) -> None:
    if args.system == "fsdp1":
        model.clip_grad_norm_(1.0)
    elif args.in_backward is None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


# -- the steps --------------------------------------------------------------------


class Peaks:
    """Peaks since the last ``mark``, by moment of the step."""

    def __init__(self) -> None:
        self.moments: dict[str, dict[str, int]] = {}

    def begin(self) -> None:
        self.moments = {}
        torch.accelerator.reset_peak_memory_stats()

    def mark(self, moment: str) -> None:
        now = peaks()
        before = self.moments.get(moment, now)
        self.moments[moment] = {k: max(now[k], before[k]) for k in now}
        torch.accelerator.reset_peak_memory_stats()

    def step(self) -> dict[str, Any]:
        return {
            "moments": self.moments,
            **{
                kind: max(peaks[kind] for peaks in self.moments.values())
                for kind in ("allocated", "reserved")
            },
        }


def train(args: argparse.Namespace) -> dict[str, Any]:
    model = WRAP[args.system](build(args), args)
    optimizer = make_optimizer(model, args)
    peaks, steps = Peaks(), []
    for _ in range(NUM_STEPS):
        peaks.begin()
        for microbatch in range(args.microbatches):
            last = microbatch == args.microbatches - 1
            with set_sync(model, last or args.reduce_every):
                tokens = torch.zeros(
                    1, args.sequence + 1, dtype=torch.long, device="cuda"
                )
                loss = model(tokens[:, :-1], tokens[:, 1:])
                peaks.mark("forward")
                loss.backward()
                del loss, tokens
                peaks.mark("backward")
        clip(model, args)
        optimizer.step()
        optimizer.zero_grad()
        peaks.mark("optimizer")
        steps.append(peaks.step())
        if args.system == "lowtide":
            tune(model, args)
    kinds = ("allocated", "reserved")
    return {
        # What stays the same from step to step, once the optimizer has its state.
        "steady": steps[-1],
        # The highest of all steps, the first ones included.
        "from_start": {kind: max(step[kind] for step in steps) for kind in kinds},
        "retries": torch.accelerator.memory_stats().get("num_alloc_retries", 0),
    }


def main() -> None:
    args = parser().parse_args()
    start(args.world, expandable=args.expandable)
    if args.whole_embedding:
        from lowtide._sharding import embedding

        embedding.LARGE_TABLE = 1 << 62
    json.dump(train(args), sys.stdout)


if __name__ == "__main__":
    main()
