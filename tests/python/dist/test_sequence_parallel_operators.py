"""Every custom operator passes torch.library.opcheck; here those of sequence
parallelism, on two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

PASSED = {
    "test_schema": "SUCCESS",
    "test_autograd_registration": "SUCCESS",
    "test_faketensor": "SUCCESS",
    "test_aot_dispatch_dynamic": "SUCCESS",
}
# Where the others are checked.
ELSEWHERE = {
    "ops/test_list_operators.py": (
        "foreach_copy_",
        "foreach_add_",
        "foreach_scale_",
        "foreach_l2_norm",
        "add_rows_",
        "weight_gradient_",
    ),
    "compile/test_fused_compile.py": ("fused_linear", "add_weight_gradient"),
    "unit/test_losses_autograd.py": (
        "linear_cross_entropy",
        "linear_cross_entropy_backward",
        "linear_cross_entropy_and_gradients",
        "scale_gradient_",
    ),
}
# A mark that a trace removes and eager code refuses: compile/test_activation_graphs.py.
NO_OPERATOR = {"named"}


def cases() -> dict[str, list[tuple[Any, ...]]]:
    """Arguments of each operator."""
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    torch.manual_seed(dist.get_rank())
    shard = torch.randn(3, 2, 4, requires_grad=True)
    whole = torch.randn(6, 2, 4, requires_grad=True)
    weights = [torch.randn(n, 4, requires_grad=True) for n in (5, 2)]
    bias = torch.randn(2, requires_grad=True)
    linear, backward = [], []
    for regather in (True, False):
        settings = (group, "qkv", regather, False)
        linear += [
            (shard, weights, [bias], [False, True], *settings),
            (shard.detach(), weights[:1], [], [False], *settings),
        ]
        source = (shard if regather else whole).detach()
        gradients = [torch.randn(6, 2, n) for n in (5, 2)]
        plain = [w.detach() for w in weights]
        present, needs = [True, True], [True] * 4 + [False]
        backward += [
            (source, gradients, present, plain, needs, *settings),
            (source, gradients[1:], [False, True], plain, needs, *settings),
        ]
    return {
        "sp_all_gather": [(shard, group, "x"), (shard.detach(), group, "x")],
        "sp_reduce_scatter": [(whole, group), (whole.detach(), group)],
        "sp_gather_linear": linear,
        "sp_gather_linear_backward": backward,
    }


def check_all() -> tuple[dict[str, list[dict[str, str]]], set[str]]:
    """What opcheck found, and which operators there are."""
    import lowtide._activation.compiled
    import lowtide.losses
    import lowtide.sequence_parallel.operators  # noqa: F401

    found = {
        name: [
            torch.library.opcheck(getattr(torch.ops.lowtide, name).default, arguments)
            for arguments in calls
        ]
        for name, calls in cases().items()
    }
    names = torch._C._dispatch_get_all_op_names()
    every = {n.partition("::")[2] for n in names if n.startswith("lowtide::")}
    return found, {name.partition(".")[0] for name in every}


def test_every_operator_passes_torchs_checks(pool_of):
    for found, every in pool_of(2).run(check_all, timeout=100):
        for name, results in found.items():
            assert results == [PASSED] * len(results), name
        elsewhere = {name for names in ELSEWHERE.values() for name in names}
        assert every == set(found) | elsewhere | NO_OPERATOR
