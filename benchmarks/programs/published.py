"""Programs that others measured on real GPUs: ``published.py MODULE.RECIPE
[name=value ...]`` prints {metric: bytes} as JSON.

Run dry by benchmarks/cases/published.py, which names each source. Two settings are
of every recipe:

    segments=expandable  as PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    attention=flash      torch's choice before cuDNN's attention came first on Hopper
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from typing import Any


def main() -> None:
    module, recipe = sys.argv[1].split(".")
    settings: dict[str, Any] = dict(
        argument.split("=", maxsplit=1) for argument in sys.argv[2:]
    )
    if settings.pop("attention", "") == "flash":
        os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
    expandable = settings.pop("segments", "") == "expandable"
    values = {k: int(v) if v.isdigit() else v for k, v in settings.items()}
    # What the programs print is not the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch

    if expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    run = getattr(importlib.import_module(f"published_{module}"), recipe)
    # A graph that is in a cache is compiled without the measurements, which take
    # memory too.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        print(json.dumps(run(**values)), file=answer, flush=True)


if __name__ == "__main__":
    main()
