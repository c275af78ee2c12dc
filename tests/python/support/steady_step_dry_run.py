"""How often the host waits for the device in training steps on CUDA, over the stub.

python steady_step_dry_run.py           prints {kind of step: waits in each step}
python steady_step_dry_run.py small     prints {number of small parameters in a unit:
                                        launches that sharding adds to a backward}, with
                                        sync and without
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowtide
from llama import CONFIGS, Llama

NUM_STEPS = 6
SHAPE = (1, 33)
# Its attention's logsumexp is small beside the output, which can be saved by name.
TINY = replace(CONFIGS["tiny"], num_heads=2, num_kv_heads=1)


def name_attention(model: Any) -> None:
    for layer in model.layers:
        layer.attention.wo.register_forward_pre_hook(
            lambda _, args: (lowtide.tag(args[0], "attended"),)
        )


def drop_out(model: Any) -> None:
    for layer in model.layers:
        layer.feed_forward.register_forward_hook(
            lambda *call: nn.functional.dropout(call[-1], 0.1)
        )


KINDS: dict[str, dict[str, Any]] = {
    "each backward reduces": {},
    "two microbatches without sync": {"microbatches": 2},
    "checkpointed": {"policy": lowtide.ActivationPolicy()},
    "checkpointed, dropout": {
        "policy": lowtide.ActivationPolicy(),
        "prepare": drop_out,
    },
    "offloaded": {"policy": lowtide.ActivationPolicy(offload=["input"])},
    "offloaded and saved": {
        "policy": lowtide.ActivationPolicy(offload=["input"], save=["attended"]),
        "prepare": name_attention,
    },
    "fused": {"grads": "fused"},
    "fused, two microbatches without sync": {"grads": "fused", "microbatches": 2},
    "fused and compiled": {"grads": "fused", "compiled": True},
    "read back": {"read": True},
}


def host_waits() -> int:
    waits = ctypes.CDLL(None).cuda_stub_waits
    waits.restype = ctypes.c_int64
    return waits()


def step_of(
    *,
    microbatches: int = 1,
    grads: Literal["exact", "fused"] = "exact",
    policy: lowtide.ActivationPolicy | None = None,
    read: bool = False,
    compiled: bool = False,
    capturable: bool = False,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> Callable[[], None]:
    with torch.device("meta"):
        model: Any = Llama(TINY)
    precision = lowtide.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        if compiled:
            layer.compile(backend="aot_eager", fullgraph=True)
        if policy is not None:
            lowtide.checkpoint(layer, policy)
        lowtide.fully_shard(layer, mp_policy=precision, grads=grads)
    lowtide.fully_shard(model, mp_policy=precision, grads=grads)
    model.to_empty(device="cuda")
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)
    tokens = torch.zeros(SHAPE, dtype=torch.long, device="cuda")

    def step() -> None:
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
            loss = model(tokens[:, :-1]).float().square().mean()
            loss.backward()
        lowtide.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if read:
            loss.item()

    return step


def units_of(model: Any) -> list[Any]:
    return [*model.layers, model]


def waits_of(step: Callable[[], None]) -> list[int]:
    found = []
    for _ in range(NUM_STEPS):
        before = host_waits()
        step()
        found.append(host_waits() - before)
    return found


def launches() -> int:
    count = ctypes.CDLL(None).cuda_stub_launches
    count.restype = ctypes.c_int64
    return count()


def launches_of_backward(num_norms: int, *, sharded: bool, sync: bool) -> int:
    norms = (nn.LayerNorm(64) for _ in range(num_norms))
    model: Any = nn.Sequential(*norms).to("cuda", torch.bfloat16)
    if sharded:
        lowtide.fully_shard(
            model,
            mp_policy=lowtide.MixedPrecisionPolicy(reduce_dtype=torch.float32),
        )
        model.set_requires_gradient_sync(sync)
    found = 0
    for _ in range(3):
        loss = model(torch.zeros(2, 64, device="cuda", dtype=torch.bfloat16)).sum()
        before = launches()
        loss.backward()
        found = launches() - before
        if sync:
            model.zero_grad()
    return found


def added_launches(num_norms: int, *, sync: bool) -> int:
    sharded = launches_of_backward(num_norms, sharded=True, sync=sync)
    # Without sharding AccumulateGrad keeps the first gradients as they are.
    return sharded - launches_of_backward(num_norms, sharded=False, sync=True)


def main(what: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if what == "small":
        found: Any = {
            str(sync): {n: added_launches(n, sync=sync) for n in (2, 8)}
            for sync in (True, False)
        }
    else:
        found = {name: waits_of(step_of(**kind)) for name, kind in KINDS.items()}
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[-1])
