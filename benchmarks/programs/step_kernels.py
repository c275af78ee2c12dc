"""What a GPU does in a step of llama_speed.py, as JSON: {system: {kind of kernel:
milliseconds of a step}}, and the kernels that take longest.

    step_kernels.py --num-layers 8 --loss chunked:16 --rounds 4
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from llama_speed import SYSTEMS, build, options, step_of
from stage import start_real_ranks
from torch.profiler import ProfilerActivity, profile

# The first that its name matches.
KINDS = {
    "lowtide": r"lowtide",
    "NCCL": r"nccl",
    "copies of the device": r"Memcpy DtoD",
    "copies to and from the host": r"Memcpy",
    "filling": r"Memset|FillFunctor",
    "attention": r"flash|fmha|attention",
    "products": r"gemm|nvjet|cutlass|cublas|xmma|splitK",
    "lists of tensors": r"multi_tensor_apply|foreach",
}
OTHERS = "others"
WARM_UP = 2


def kind_of(kernel: str) -> str:
    for kind, pattern in KINDS.items():
        if re.search(pattern, kernel):
            return kind
    return OTHERS


def kernels(step: Any, rounds: int) -> dict[str, Any]:
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            step()
        torch.cuda.synchronize()
    names: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            names[event.name] += event.self_device_time_total / 1e3 / rounds
    kinds: Counter[str] = Counter()
    for name, ms in names.items():
        kinds[kind_of(name)] += ms
    longest = {name[:160]: round(ms, 3) for name, ms in names.most_common(40)}
    return {"kinds": dict(kinds), "longest": longest}


def main() -> None:
    args = options()
    start_real_ranks()
    figures = {}
    for system in SYSTEMS:
        model = build(args, system)
        vocabulary = model.tok_embeddings.weight.shape[0]
        tokens = torch.randint(vocabulary, (1, args.sequence + 1), device="cuda")
        figures[system] = kernels(step_of(model, tokens), args.rounds)
        del model
        torch.cuda.empty_cache()
    print(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
