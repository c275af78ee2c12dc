"""The sizes of the measurements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    segments: tuple[str, ...]  # of the allocator: default, expandable
    llama: tuple[str, ...]  # options of llama_memory.py: the slice
    llama_loss: str
    compared: tuple[str, ...]  # the same, for bits beside FSDP2's
    ranks: tuple[str, ...]  # the same, of ranks that share a GPU
    accounted: tuple[str, ...]  # the same, beside the ledger and a dry step
    flat_widths: str
    residual: tuple[int, int, int]  # layers, rows, width
    link_bytes: int
    kernel_elements: int
    rate_tokens: int
    recipes: int  # of benchmarks/gpu/measure_plan.py
    frameworks: tuple[str, ...]  # of examples/frameworks
    trainer: tuple[str, ...]  # torchtitan's model, flavor and options
    trained: tuple[str, ...]  # names of measure_trainer.MODELS
    host_layers: int
    rounds: int
    host_steps: int


# Eight layers of an 8B Llama with the full head; the reports' own sizes.
FULL = Scale(
    segments=("default", "expandable"),
    llama=("--config", "8b", "--num-layers", "8", "--sequence", "8192"),
    llama_loss="chunked:16",
    compared=("--config", "8b", "--num-layers", "2", "--sequence", "1024"),
    ranks=(
        *("--config", "8b", "--num-layers", "2"),
        *("--vocab-size", "16384", "--sequence", "512"),
    ),
    accounted=("--config", "8b", "--num-layers", "2", "--sequence", "4096"),
    flat_widths="published",
    residual=(32, 16 * 4096, 2048),
    link_bytes=1 << 30,
    kernel_elements=1 << 28,
    rate_tokens=8192,
    recipes=9,
    frameworks=("accelerate", "transformers", "lightning", "peft"),
    trainer=("llama3", "8B", "--training.seq_len", "8192"),
    trained=("llama", "compiled", "float8", "tensor parallel", "experts"),
    host_layers=32,
    rounds=8,
    host_steps=30,
)
# For dry runs: the same programs, figures that mean nothing.
TINY = Scale(
    segments=("default",),
    llama=("--config", "tiny", "--sequence", "64"),
    llama_loss="chunked:2",
    compared=("--config", "tiny", "--sequence", "64"),
    ranks=("--config", "tiny", "--sequence", "64"),
    accounted=("--config", "tiny", "--sequence", "64"),
    flat_widths="tiny",
    residual=(4, 256, 128),
    link_bytes=1 << 12,
    kernel_elements=1 << 18,
    rate_tokens=128,
    recipes=0,
    frameworks=(),
    trainer=("llama3", "debugmodel", "--training.seq_len", "64"),
    trained=(),
    host_layers=2,
    rounds=2,
    host_steps=2,
)
