"""Losses and parameters of training steps, bit by bit beside FSDP2's, as JSON; on one
rank, or on those of torchrun's environment, each with data of its own; with torch's
deterministic algorithms.

    bits.py --num-layers 2 --sequence 1024 --loss chunked:4 [--cpu | --captured]

Options are those of llama_memory.py. Of each variant: in how many steps the loss
differs, and how many elements of the parameters do at the end. FSDP2 itself is among
them, trained once more: what differs there is not deterministic. Then, of one rank, the
error of a weight's gradient in both modes, beside a product in fp64. ``--captured``:
the variants in CUDA graphs instead.
"""

from __future__ import annotations

import gc
import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from beside_fp64 import deferred_errors, gradient_errors
from llama_memory import parser
from llama_speed import build
from stage import start_real_ranks
from torch import Tensor, nn

NUM_STEPS, WARM_UP = 6, 3


@dataclass(frozen=True)
class Variant:
    system: str = "lowtide"
    microbatches: int = 1  # all but the last without sync
    offload: bool = False  # blocks are checkpointed, their inputs on the host
    capture: bool = False  # the steps behind the warm-up are one CUDA graph
    in_backward: bool = False  # the optimizer steps there
    clips: bool = True
    on_host: bool = False  # parameters, for both systems
    on_device: bool = False  # steps of these, beside FSDP2's of parameters there
    growing: bool = False  # segments, where AdamW steps a unit as one tensor

    @property
    def compared_with(self) -> Variant:
        on_host = self.on_host and not self.on_device
        theirs = Variant("fsdp2", self.microbatches, on_host=on_host)
        return replace(theirs, clips=self.clips, growing=self.growing)


AGAIN = "FSDP2 again"
EAGER = {
    AGAIN: Variant("fsdp2"),
    "lowtide": Variant(),
    "lowtide, two microbatches": Variant(microbatches=2),
    "lowtide, offloaded": Variant(offload=True),
    "lowtide, optimizer in backward": Variant(in_backward=True),
    "lowtide, parameters on the host": Variant(on_host=True, clips=False),
    "lowtide, parameters on the host, stepped on the device": Variant(
        on_host=True, on_device=True, clips=False
    ),
    "lowtide, units stepped as one tensor": Variant(growing=True),
}
CAPTURED = {
    "lowtide, captured": Variant(capture=True),
    "lowtide, offloaded and captured": Variant(offload=True, capture=True),
}


@dataclass(frozen=True)
class Trained:
    losses: list[Tensor]
    parameters: list[Tensor]


def train(args: Namespace, variant: Variant) -> Trained:
    def prepare(model: Any) -> None:
        if variant.offload:
            import lowtide

            policy = lowtide.ActivationPolicy(offload=["input"])
            for layer in model.layers:
                lowtide.checkpoint(layer, policy)

    of_variant = {"parameters_on_host": variant.on_host}
    model = build(Namespace(**vars(args) | of_variant), variant.system, prepare)
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    if variant.growing:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if variant.on_device:
        import lowtide

        lowtide.step_on_device(optimizer)
    if variant.in_backward:
        import lowtide

        lowtide.optimize_in_backward(model, optimizer, max_norm=1.0)
    data = batches(args, model)
    tokens = torch.empty_like(data[0])

    def step() -> Tensor:
        for left in reversed(range(variant.microbatches)):
            model.set_requires_gradient_sync(left == 0)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        if variant.clips and not variant.in_backward:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = []
    eager = WARM_UP if variant.capture else NUM_STEPS
    with off_the_default_stream(variant.capture):
        for each in data[:eager]:
            tokens.copy_(each)
            losses.append(step().clone())
    if variant.capture:
        again, loss = captured(step)
        for each in data[eager:]:
            tokens.copy_(each)
            again()
            losses.append(loss.clone())
    parameters = [
        p.to_local().detach().to("cpu", copy=True) for p in model.parameters()
    ]
    return Trained(losses, parameters)


def batches(args: Namespace, model: Any) -> Tensor:
    """[steps, 1, sequence + 1], of each rank its own."""
    vocabulary = model.tok_embeddings.weight.shape[0]
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (NUM_STEPS, 1, args.sequence + 1)
    return torch.randint(vocabulary, shape, generator=generator).to(args.device)


def trained(args: Namespace, variant: Variant) -> Trained:
    """Then nothing of its model is left, and no memory of a graph's pool."""
    growing = f"expandable_segments:{variant.growing}"
    if args.device == "cuda":
        torch.cuda.memory._set_allocator_settings(growing)
    result = train(args, variant)
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return result


@contextmanager
def off_the_default_stream(wanted: bool) -> Iterator[None]:
    """For the steps before a capture."""
    if not wanted:
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def captured(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """What runs the step again, and where its loss is then."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph.replay, loss


def differences(ours: Trained, theirs: Trained) -> dict[str, int]:
    losses = zip(ours.losses, theirs.losses, strict=True)
    parameters = zip(ours.parameters, theirs.parameters, strict=True)
    return {
        "losses": sum(differing(a, b) for a, b in losses),
        "parameters": sum(differing(a, b) for a, b in parameters),
    }


def differing(a: Tensor, b: Tensor) -> int:
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


def of_all_ranks(counts: dict[str, int], device: str) -> dict[str, int]:
    if dist.get_world_size() == 1:
        return counts
    total = torch.tensor(list(counts.values()), device=device)
    dist.all_reduce(total)
    return dict(zip(counts, total.tolist(), strict=True))


def beside_fsdp2(
    args: Namespace, variants: Mapping[str, Variant]
) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for reference in dict.fromkeys(v.compared_with for v in variants.values()):
        theirs = trained(args, reference)
        for name, variant in variants.items():
            if variant.compared_with == reference:
                counts = differences(trained(args, variant), theirs)
                found[name] = of_all_ranks(counts, args.device)
    return found


def beside_whole_matrices(args: Namespace) -> dict[str, int]:
    """Elements that differ after `lowtide.Muon` of the blocks' sharded matrices and
    torch's of whole ones, which have the same gradients."""
    import lowtide

    model = build(args, "lowtide")
    sharded = [p for p in model.layers.parameters() if p.dim() == 2]
    whole = [nn.Parameter(whole_of(p)) for p in sharded]
    ours, theirs = lowtide.Muon(sharded, lr=0.02), torch.optim.Muon(whole, lr=0.02)
    for tokens in batches(args, model)[:WARM_UP]:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        for p, matrix in zip(sharded, whole, strict=True):
            matrix.grad = whole_of(p.grad)
        ours.step()
        theirs.step()
        model.zero_grad()
    pairs = list(zip(sharded, whole, strict=True))
    counts = {
        "matrices": sum(differing(whole_of(p), matrix) for p, matrix in pairs),
        "momenta": sum(
            differing(whole_of(momentum(ours, p)), momentum(theirs, matrix))
            for p, matrix in pairs
        ),
    }
    return of_all_ranks(counts, args.device)


def whole_of(tensor: Any) -> Tensor:
    return tensor.detach().full_tensor().clone()


def momentum(optimizer: torch.optim.Optimizer, p: Tensor) -> Any:
    return optimizer.state[p]["momentum_buffer"]


def main() -> None:
    base = parser()
    base.set_defaults(device="cuda", checkpoint="none")
    base.add_argument("--cpu", dest="device", action="store_const", const="cpu")
    base.add_argument("--captured", action="store_true")
    args = base.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # With warn_only, flash attention's backward would stay as it is.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    start_real_ranks(args.device)
    figures: dict[str, Any] = {
        "beside FSDP2": beside_fsdp2(args, CAPTURED if args.captured else EAGER)
    }
    if not args.captured:
        figures["Muon beside whole matrices"] = beside_whole_matrices(args)
        if dist.get_world_size() == 1:
            figures["gradient errors"] = gradient_errors(args.device)
            tokens = args.sequence // 4
            figures["deferred errors"] = deferred_errors(args.device, tokens)
    print(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
