"""Whole trainers that others measured on real GPUs, as their repositories have them
(published.py runs them): only text and tokens to train on are made here."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from published_support import check_out, file_at, peaks, use_packages

GIB = 1 << 30


@contextlib.contextmanager
def _working_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        before = Path.cwd()
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


class _MemoryLines(logging.Filter):
    """What torchtitan says it took, in its steps' order; it clears the handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.gibibytes: list[float] = []

    def filter(self, record: logging.LogRecord) -> bool:
        said = re.search(r"step: .*memory: *([0-9.]+)GiB", record.getMessage())
        if said:
            self.gibibytes.append(float(said[1]))
        return True


def torchtitan(
    commit: str, file: str, config: str, ranks: int, arguments: str = ""
) -> dict[str, int]:
    """Twenty steps of the trainer ``file`` with a configuration of its own; "first"
    and "steady" are the peaks that it logs."""
    assert ranks == int(os.environ["WORLD_SIZE"])
    use_packages()
    with _working_folder() as folder:
        tree = folder / "tree"
        wanted = ("torchtitan", "train.py", "train_configs")
        check_out("torchtitan", commit, *wanted, into=tree)
        # A package of its own, whichever else is installed.
        (tree / "torchtitan" / "__init__.py").touch()
        is_of_2024 = not (tree / "torchtitan" / "config").exists()
        if is_of_2024:
            tokens = folder / "tokenizer.model"
            _write_tokenizer(tokens)
            tokenizer = ("--model.tokenizer_path", str(tokens))
        else:
            _write_words(folder / "tokenizer.json")
            tokenizer = ("--model.hf_assets_path", str(folder))
        texts = folder / "texts"
        texts.mkdir()
        line = json.dumps({"text": "a b c d " * 10000})
        (texts / "data.json").write_text(f"{line}\n" * 8)
        os.environ |= {"HF_HOME": str(folder / "cache"), "HF_DATASETS_OFFLINE": "1"}
        sys.path.insert(0, str(tree))
        sys.argv = [
            *(file, "--job.config_file", str(tree / config)),
            *("--job.dump_folder", str(folder / "out")),
            *tokenizer,
            *("--training.dataset", "c4_test"),
            *("--training.dataset_path", str(texts)),
            *("--training.steps", "20", *arguments.split()),
        ]
        lines = _MemoryLines()
        logging.getLogger().addFilter(lines)
        runpy.run_path(str(tree / file), run_name="__main__")
    first, *_, steady = (int(size * GIB) for size in lines.gibibytes)
    return peaks() | {"first": first, "steady": steady}


def _write_tokenizer(path: Path) -> None:
    """128,000 tokens, as Llama 3 has beside 256 reserved ones: bytes, and such as no
    text contains."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += [b"\0" + index.to_bytes(4, "big") for index in range(256, 128000)]
    with path.open("w") as file:
        for index, token in enumerate(tokens):
            file.write(f"{base64.b64encode(token).decode()} {index}\n")


def _write_words(path: Path) -> None:
    """Of one letter each: how many a model knows is its own figure by now."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    words = {word: number for number, word in enumerate(["?", *"abcd", *special])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path))
    names = dict(zip(("bos_token", "eos_token"), special, strict=True))
    path.with_name("tokenizer_config.json").write_text(json.dumps(names))


def modded_nanogpt(log: str) -> dict[str, int]:
    """The program that a record's log begins with, whole: 1,390 to 1,490 steps over
    shards as long as the real ones, of zeros."""
    import numpy

    text = file_at("modded-nanogpt", "f411b3d3", log)
    program = re.split(r"^={60,}$", text, maxsplit=1, flags=re.MULTILINE)[0]
    num_tokens, num_shards = 100_000_000, 10
    with _working_folder() as folder:
        data = folder / "data" / "fineweb10B"
        data.mkdir(parents=True)
        (folder / "logs").mkdir()
        header = numpy.zeros(256, dtype=numpy.int32)
        header[:3] = 20240520, 1, num_tokens
        shards = [f"train_{number:06d}" for number in range(1, num_shards + 1)]
        for shard in (*shards, "val_000000"):
            with (data / f"fineweb_{shard}.bin").open("wb") as file:
                file.write(header.tobytes())
                file.truncate(header.nbytes + 2 * num_tokens)
        # The log begins with what this command says.
        command = folder / "nvidia-smi"
        command.write_text("#!/bin/sh\n")
        command.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        (folder / "train_gpt.py").write_text(program)
        sys.argv = ["train_gpt.py"]
        runpy.run_path("train_gpt.py", run_name="__main__")
    return peaks()
