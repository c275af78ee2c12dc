"""torchtitan's own trainer (0.3) on one of its configurations, on tokens that cost
nothing to load: run by unedited.py.

titan_configured.py MODEL CONFIGURATION [no_graphs] [full_checkpointing]

JSON: peaks of the last step, in bytes, and from the process's start.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile

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

from support.titan_configs import CHECKPOINTING, Batches, NoTokenizer  # noqa: E402

STEPS = 4  # one eager, one captured


def main(model: str, configuration: str, *changes: str) -> None:
    # What the compiler prints is not the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
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
    if "full_checkpointing" in changes:
        full = CHECKPOINTING["full"]
        assert full is not None
        config.activation_checkpoint = full()
    trainer = config.build()
    trainer.train()
    torch.cuda.synchronize()
    peaks = torch.cuda.memory_stats()
    found = {
        kind: peaks[f"{kind}_bytes.all.peak"] for kind in ("reserved", "allocated")
    }
    print(json.dumps({"from_start": found}), file=answer, flush=True)
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
