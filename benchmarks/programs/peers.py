"""Peak bytes and simulated time of a Llama's training step under systems of others, as
JSON; each as its own documentation tunes it for memory, none of them changed:

    python -m lowtide phantom --world 8 -- peers.py --system deepspeed --world 8 [...]

The model, the loss and the steps are llama_memory.py's: fp32 parameters and optimizer
states, bf16 compute, every block checkpointed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llama_memory import BF16, FP32, NUM_STEPS, WRAP, Peaks, build
from llama_memory import parser as options
from published_support import check_out, use_packages
from stage import start
from torch import Tensor, nn

import lowtide.phantom

# Loss of tokens and targets, and what makes a step of its gradients.
Stepper = Callable[[Tensor, Tensor, Peaks], None]
LEARNING_RATE, MAX_NORM = 1e-3, 1.0
# torchtitan's last commit with SimpleFSDP as an experiment of its own.
SIMPLE_FSDP = "c8d2d7181~1"


def plain(model: Any, optimizer: Any, clip: Callable[[], object]) -> Stepper:
    def step(tokens: Tensor, targets: Tensor, peaks: Peaks) -> None:
        loss = model(tokens, targets)
        peaks.mark("forward")
        loss.backward()
        del loss
        peaks.mark("backward")
        clip()
        optimizer.step()
        optimizer.zero_grad()
        peaks.mark("optimizer")

    return step


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def by_parameters(model: Any, optimizer: Any) -> Stepper:
    parameters = list(model.parameters())
    return plain(
        *(model, optimizer),
        lambda: nn.utils.clip_grad_norm_(parameters, MAX_NORM),
    )


def sharded(args: argparse.Namespace) -> Stepper:
    """lowtide, FSDP2 and FSDP1, as llama_memory.py has them."""
    model: Any = WRAP[args.system](build(args), args)
    optimizer = adamw(model.parameters())
    if args.system == "fsdp1":
        return plain(model, optimizer, lambda: model.clip_grad_norm_(MAX_NORM))
    return by_parameters(model, optimizer)


def on_device(args: argparse.Namespace) -> nn.Module:
    return build(args).to_empty(device="cuda")


def ddp(args: argparse.Namespace) -> Stepper:
    """With gradients that are views of the buckets, and no second set of buckets."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        on_device(args),
        device_ids=[0],
        gradient_as_bucket_view=True,
        static_graph=True,
    )
    inner = by_parameters(model, adamw(model.parameters()))

    def step(tokens: Tensor, targets: Tensor, peaks: Peaks) -> None:
        with torch.autocast("cuda", BF16):
            inner(tokens, targets, peaks)

    return step


def megatron_fsdp(args: argparse.Namespace) -> Stepper:
    """A unit a block, its strategy 3, fp32 beside bf16 parameters, gradients and their
    reduction in fp32."""
    use_packages()
    from megatron_fsdp import (
        MixedPrecisionPolicy,
        fully_shard_model,
        fully_shard_optimizer,
        param_and_grad_buffer,
    )

    # It asks every rank where its parts end; ranks that are not there cannot answer.
    param_and_grad_buffer.validate_uneven_dtensor = leave_as_they_are

    model: Any = build(args).to(BF16)
    model.rope = torch.empty_like(model.rope, device="cuda")  # it knows parameters only
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            # What it asks of a model that comes on the meta device.
            type(module).reset_parameters = leave_as_they_are
    wrapped = fully_shard_model(
        module=model,
        fsdp_unit_modules=[type(model.layers[0])],
        zero_dp_strategy=3,
        init_model_with_meta_device=True,
        mixed_precision_policy=MixedPrecisionPolicy(
            main_params_dtype=FP32, main_grads_dtype=FP32, grad_comm_dtype=FP32
        ),
    )
    optimizer = fully_shard_optimizer(adamw(wrapped.parameters()))
    return by_parameters(wrapped, optimizer)


def leave_as_they_are(values: object) -> None:
    """Values are of no interest here."""


def deepspeed(args: argparse.Namespace) -> Stepper:
    """ZeRO-3 with the sizes of its documentation, torch's fused AdamW, gradients
    reduced and accumulated in fp32."""
    use_packages()
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 500_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        },
        "zero_allow_untested_optimizer": True,
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(args, device="cuda")
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config
    )

    def step(tokens: Tensor, targets: Tensor, peaks: Peaks) -> None:
        loss = engine(tokens, targets)
        peaks.mark("forward")
        engine.backward(loss)
        del loss
        peaks.mark("backward")
        engine.step()
        peaks.mark("optimizer")

    return step


def simple_fsdp(args: argparse.Namespace) -> Stepper:
    """torchtitan's, compiled whole by inductor, its blocks' collectives in buckets and
    gathered again in backward."""
    from torch.distributed.device_mesh import init_device_mesh

    with tempfile.TemporaryDirectory() as folder:
        check_out("torchtitan", SIMPLE_FSDP, "torchtitan", into=Path(folder))
        sys.path.insert(0, str(Path(folder) / "torchtitan/experiments/simple_fsdp"))
        from reshard_after_forward import annotate_fsdp_all_gather
        from simple_fsdp import MixedPrecisionPolicy, data_parallel
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.fx_passes.overlap_manual_scheduling import (
        manual_overlap_bucketing,
    )

    mesh = init_device_mesh("cuda", (args.world,))
    model = data_parallel(
        build(args),
        mesh,
        mode="fully_shard",
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    ).to_empty(device="cuda")
    blocks = [f"layers.{number}" for number in range(len(model.layers))]
    plans: list[Any] = ["tok_embeddings", *blocks, ["norm", "output"]]

    def bucket(graph: Any) -> Any:
        return manual_overlap_bucketing(
            graph.owning_module, module_bucket_plans=plans, insert_overlap_deps=True
        )

    inductor_config.reorder_for_peak_memory = False
    inductor_config.allow_buffer_reuse = False
    inductor_config.reorder_for_compute_comm_overlap = False
    inductor_config.post_grad_custom_post_pass = bucket

    def gather_again(graph: Any, inputs: Any) -> Any:
        graph = annotate_fsdp_all_gather(graph, True)
        graph.recompile()
        return graph

    inductor = torch._dynamo.lookup_backend("inductor")

    def backend(*of: Any, **named: Any) -> Any:
        with functorch_config.patch("joint_custom_pass", gather_again):
            return inductor(*of, **named)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    return by_parameters(compiled, adamw(model.parameters()))


SYSTEMS: dict[str, Callable[[argparse.Namespace], Stepper]] = {
    "lowtide": sharded,
    "fsdp2": sharded,
    "fsdp1": sharded,
    "megatron_fsdp": megatron_fsdp,
    "deepspeed": deepspeed,
    "simple_fsdp": simple_fsdp,
    "ddp": ddp,
}


def train(args: argparse.Namespace, time: lowtide.phantom.timeline) -> dict[str, Any]:
    step, peaks, steps = SYSTEMS[args.system](args), Peaks(), []
    for _ in range(NUM_STEPS):
        time.begin_step()
        time.phase("step")
        peaks.begin()
        shape = (1, args.sequence + 1)
        tokens = torch.zeros(*shape, dtype=torch.long, device="cuda")
        step(tokens[:, :-1], tokens[:, 1:], peaks)
        steps.append(peaks.step())
    return {"steady": steps[-1], "highest": max(one["reserved"] for one in steps)}


def main() -> None:
    also = options()
    (system,) = (a for a in also._actions if a.dest == "system")
    system.choices = list(SYSTEMS)
    args = also.parse_args()
    start(args.world, expandable=args.expandable)
    with lowtide.phantom.timeline() as time:
        figures = train(args, time)
    json.dump(figures | {"time": time.report().to_dict()}, sys.stdout)


if __name__ == "__main__":
    main()
