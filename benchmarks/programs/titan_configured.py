"""torchtitan's own trainer (0.3) on one of its configurations, on tokens that cost
nothing to load: run by unedited.py.

titan_configured.py MODEL CONFIGURATION [CHANGE ...]

CHANGE: no_graphs, compiled, full_checkpointing, two_sequences a rank, experts_over_8
ranks; whole_logits: a loss without chunks, and `partial_dtensor`; float8_gathers:
torchao's tensorwise recipe in all layers but the head, weights gathered in float8,
their scales in advance.

JSON: peaks from the process's start, and what a rank gives to the all-gathers of the
last step, in bytes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from typing import Any

import torch

from support.titan_on_cpus import HAS_CONFIGS, stand_in_for_absent

if not HAS_CONFIGS:
    sys.exit(
        "lowtide: titan_configured: expected torchtitan 0.3, got an older one. Run it "
        "with torch 2.15."
    )
stand_in_for_absent()
# torchao 0.18's kernels are refused by the triton of torch 2.15 where there is a GPU;
# torchtitan goes on without them.
sys.modules["torchao.prototype.moe_training"] = None  # type: ignore[assignment]

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402

from lowtide.phantom.dry import driver  # noqa: E402
from support.titan_configs import CHECKPOINTING, Batches, NoTokenizer  # noqa: E402

STEPS = 4  # one eager, one captured
REGISTRIES = {"mixtral": "titan_mixtral"}  # of models that torchtitan does not have


def main(model: str, configuration: str, *changes: str) -> None:
    # What the compiler prints is not the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    registry = importlib.import_module(
        REGISTRIES.get(model, f"torchtitan.models.{model}.config_registry")
    )
    config = getattr(registry, configuration)()
    vocabulary = config.loss.loss_fn.global_vocab_size
    config.dataloader = Batches.Config(vocabulary=vocabulary)
    config.tokenizer = NoTokenizer.Config()
    config.metrics = MetricsProcessor.Config(log_freq=1)
    config.model_spec.state_dict_adapter = None
    config.validator.enable = config.checkpoint.enable = False
    config.debug.enable_structured_logging = False
    config.profiler.enable_profiling = False
    config.dump_folder = tempfile.mkdtemp()
    config.training.steps = STEPS
    if "no_graphs" in changes:
        config.training.disable_cuda_graphs = True
    config.compile.enable |= "compiled" in changes  # blocks and loss
    if "full_checkpointing" in changes:
        full = CHECKPOINTING["full"]
        assert full is not None
        config.activation_checkpoint = full()
    if "two_sequences" in changes:
        config.training.local_batch_size = 2
    if "experts_over_8" in changes:
        config.parallelism.expert_parallel_degree = 8
    if "whole_logits" in changes:
        config.loss = config.loss.loss_fn
        config.parallelism.spmd_backend = "partial_dtensor"
    if "float8_gathers" in changes:
        gather_in_float8(config.model_spec)
    trainer = config.build()
    # The trainer forgets peaks whenever it logs them.
    trainer.metrics_processor.device_memory_monitor.reset_peak_stats = lambda: None
    calls = [0]  # until the optimizer's steps
    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(lambda *_: calls.append(driver.num_calls()))
    trainer.train()
    torch.cuda.synchronize()
    peaks = torch.cuda.memory_stats()
    found = {
        kind: peaks[f"{kind}_bytes.all.peak"] for kind in ("reserved", "allocated")
    }
    last = driver.calls()[calls[-2] : calls[-1]]
    gathered = sum(call.bytes for call in last if call.kind == "all_gather")
    said = {"from_start": found, "gathered": gathered}
    print(json.dumps(said), file=answer, flush=True)
    trainer.close()


def gather_in_float8(spec: Any) -> None:
    """What torchtitan 0.2's options `enable_fsdp_float8_all_gather` and
    `precompute_float8_dynamic_scale_for_fsdp` did, and 0.3's do not offer."""
    from torchao.float8 import (
        Float8LinearConfig,
        precompute_float8_dynamic_scale_for_fsdp,
    )
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
    from torchtitan.components.quantization import Float8Linear, Float8LinearConverter

    converter = Float8LinearConverter.Config(filter_fqns=["lm_head"]).build()
    converter.torchao_config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    spec.model = converter.convert(spec.model)
    shard = spec.parallelize_fn

    def parallelize(model: torch.nn.Module, **settings: Any) -> Any:
        for layer in model.modules():
            if isinstance(layer, Float8Linear):
                # As torchao's `Float8Linear.from_float` does.
                layer.weight = torch.nn.Parameter(
                    WeightWithDynamicFloat8CastTensor(
                        layer.weight,
                        layer.linear_mm_config,
                        layer.config.cast_config_weight.target_dtype,
                    )
                )
        return shard(model, **settings)

    def scale_in_advance(optimizers: Any, models: Any, *_: Any) -> None:
        for optimizer in optimizers:
            optimizer.register_step_post_hook(
                lambda *_: list(map(precompute_float8_dynamic_scale_for_fsdp, models))
            )

    spec.parallelize_fn = parallelize
    spec.post_optimizer_build_fn = scale_in_advance


if __name__ == "__main__":
    main(*sys.argv[1:])
