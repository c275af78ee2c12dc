"""torchtitan's trainer on the CPUs of a gloo group: 0.2's here, later ones' in
titan_configs.py.

It takes an accelerator for granted, and imports what only its metrics and its text
datasets need: both are stood in for here. Its trainer, model, parallelization,
optimizer, clipping and checkpoints are its own.

    titan_on_cpus.py SCRIPT [ARG...]     in the environment that torchrun makes
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

sys.path.append(str(Path(__file__).parents[1]))  # where this file is run as a script
from support import context_parallel

_PARALLELIZE = "torchtitan.models.llama3.infra.parallelize"
VERSION = tuple(map(int, importlib.metadata.version("torchtitan").split(".")[:2]))
HAS_CONFIGS = VERSION >= (0, 3)
SEQ_LEN, BATCH, VOCABULARY = 32, 2, 128
SIZES: dict[str, dict[str, int]] = {
    "llama3": {"dim": 64, "n_heads": 4},
    "deepseek_v3": {
        **{"dim": 64, "inter_dim": 96, "moe_inter_dim": 48, "n_heads": 4},
        **{"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
        "v_head_dim": 16,
    },
}


def stand_in_for_absent() -> None:
    """For what only its metrics and its text datasets need."""
    for name, attributes in (
        ("torch.utils.tensorboard", ("SummaryWriter",)),
        ("datasets", ("Dataset", "load_dataset")),
        ("datasets.distributed", ("split_dataset_by_node",)),
    ):
        module = types.ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, None)
        sys.modules.setdefault(name, module)


def prepare() -> None:
    """Before the first import of torchtitan in a process."""
    torch._utils._get_available_device_type = lambda: "cpu"
    stand_in_for_absent()
    if not hasattr(torch.histc, "__wrapped__"):
        torch.histc = _with_integers(torch.histc)
    os.environ["LOCAL_RANK"] = "0"  # the only CPU
    context_parallel.prepare()
    from torchtitan.components import metrics
    from torchtitan.distributed import utils

    utils.init_distributed = _join
    utils.set_pg_timeouts = lambda *args, **settings: None  # of devices' numbers
    metrics.device_module = types.SimpleNamespace(
        current_device=lambda: 0,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: types.SimpleNamespace(total_memory=1),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device: {},
    )
    if not HAS_CONFIGS:
        from torchtitan.models.moe import kernels

        # its reference for Triton's
        kernels.fill_indices_wrapper = kernels.fill_indices_cpu


def _join(*args: Any, **settings: Any) -> int:
    if HAS_CONFIGS:
        # Recomputation reads the meshes of its thread.
        torch.autograd.set_multithreading_enabled(False)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_world_size()


def _with_integers(histc: Any) -> Any:
    """As on GPUs, where routers count tokens with it."""

    @functools.wraps(histc)
    def counts(x: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
        return histc(x.double(), *args, **settings).to(x.dtype)

    return counts


class Batches:
    """Tokens by step and rank; a checkpoint has the step."""

    def __init__(self, rank: int, size: tuple[int, int], vocabulary: int) -> None:
        self.rank, self.step = rank, 0
        self.size, self.vocabulary = size, vocabulary

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.step + self.rank)
            tokens = torch.randint(0, self.vocabulary, self.size, generator=generator)
            self.step += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def always_sum(parallelize: Callable[..., Any]) -> Callable[..., Any]:
    """torchtitan has gradients divided by 1, for which FSDP2 multiplies in the
    collective unless it is told that it can not, as gloo."""

    @functools.wraps(parallelize)
    def parallelize_for_gloo(*args: Any, **settings: Any) -> Any:
        model = parallelize(*args, **settings)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize_for_gloo


class Metrics:
    """What the trainer gives its metrics processor, kept."""

    def __init__(self) -> None:
        from torchtitan.tools.utils import NoColor

        self.color = NoColor()
        self.device_memory_monitor = types.SimpleNamespace(
            device_name="CPU",
            get_peak_stats=lambda: types.SimpleNamespace(
                max_reserved_gib=0.0, max_reserved_pct=0.0
            ),
        )
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.logged: list[tuple[float, float]] = []  # loss, norm of the gradients

    def should_log(self, step: int) -> bool:
        return True

    def log(
        self, step: int, loss: float, largest: float, norm: float, **_: Any
    ) -> None:
        self.logged.append((loss, norm))

    def close(self) -> None: ...


def trainer_of(
    parallelize: Callable[[Callable[..., Any]], Callable[..., Any]],
    folder: Path,
    steps: int,
    *,
    guard: Callable[[Any], None] | None = None,
    **settings: Any,
) -> Any:
    """torchtitan's Trainer for a small Llama; ``parallelize`` changes its
    ``parallelize_fn``, ``guard`` is called with its optimizers (not by 0.2).
    ``settings`` are of its parallelism, others ``checkpointing``, ``compiled``,
    ``offloaded`` and ``whole_logits``, which 0.2 always has."""
    prepare()
    if HAS_CONFIGS:
        from support import titan_configs

        return titan_configs.trainer_of(
            lambda theirs: always_sum(parallelize(theirs)),
            folder,
            steps,
            guard,
            **settings,
        )
    settings.pop("whole_logits", None)
    # Page-locked memory is the accelerators'.
    pageable = functools.partial(CPUOffloadPolicy, pin_memory=False)
    importlib.import_module(_PARALLELIZE).CPUOffloadPolicy = pageable
    from torchtitan.protocols import train_spec
    from torchtitan.train import JobConfig, Trainer

    family = settings.pop("model", "llama3")
    spec = importlib.import_module(f"torchtitan.models.{family}").get_train_spec()
    small = dataclasses.replace(
        spec.model_args["debugmodel"],
        n_layers=3,
        vocab_size=VOCABULARY,
        **SIZES[family],
    )
    if family != "llama3":
        # Grouped products are the accelerators'.
        experts = dataclasses.replace(
            small.moe_args, num_experts=settings.pop("experts"), top_k=2
        )
        small.moe_args = dataclasses.replace(experts, use_grouped_mm=False)
    train_spec._extra_train_specs["small"] = dataclasses.replace(
        spec,
        model_args={"small": small},
        parallelize_fn=always_sum(parallelize(spec.parallelize_fn)),
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda dp_rank, **_: Batches(
            dp_rank, (BATCH, SEQ_LEN + 1), VOCABULARY
        ),
        build_metrics_processor_fn=lambda *_: Metrics(),
        state_dict_adapter=None,
    )
    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.model.name = config.model.flavor = "small"
    config.training.seq_len = SEQ_LEN
    config.training.local_batch_size = BATCH
    config.training.steps = steps
    config.training.max_norm = 0.5
    config.debug.seed = 0
    config.lr_scheduler.warmup_steps = 0
    config.optimizer.lr = 1e-2
    config.optimizer.implementation = "for-loop"
    config.checkpoint.enable = True
    config.checkpoint.interval = 2
    config.checkpoint.last_save_model_only = False
    config.training.enable_cpu_offload = settings.pop("offloaded", False)
    config.compile.enable = settings.pop("compiled", False)
    config.compile.backend = "aot_eager"
    config.activation_checkpoint.mode = settings.pop("checkpointing", "none")
    for name, value in settings.items():
        setattr(config.parallelism, name, value)
    return Trainer(config)


def run_script(path: str) -> None:
    prepare()
    from torchtitan.models import llama3

    llama3.parallelize_llama = always_sum(llama3.parallelize_llama)
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    del sys.argv[0]
    run_script(sys.argv[0])
