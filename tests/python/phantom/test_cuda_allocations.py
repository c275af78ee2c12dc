"""What the kernels that CUDA fuses leave behind and hold at most, in bytes, and the
workspaces of cuBLAS. test_operators_against_torch compares every operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.phantom import MIB, PhantomOf

BF16 = torch.bfloat16
PLAIN = {"cublas_workspace": 0}
SMALLEST = 512  # bytes of the smallest block

B, H, S, D = 2, 8, 1024, 64
HEADS = B * H * S * D * 2  # bytes of q, in bf16
ROWS = B * H * S * 4  # bytes of one fp32 a row

Measured = tuple[int, int]  # kept, at most


def measured(action: Callable[[], object]) -> Measured:
    acc = torch.accelerator
    acc.empty_cache()  # a larger block with little to spare is taken whole
    acc.reset_peak_memory_stats()
    before = acc.memory_allocated()
    kept = action()
    result = acc.memory_allocated() - before, acc.max_memory_allocated() - before
    del kept
    return result


def heads(count: int = H, dtype: torch.dtype = BF16) -> torch.Tensor:
    """As a projection leaves them: [batch, heads, sequence, dim] over [b, s, h, d]."""
    x = torch.empty(B, S, count, D, dtype=dtype, device="phantom")
    return x.transpose(1, 2).requires_grad_()


# -- attention ------------------------------------------------------------------------


def attention(
    kv_heads: int = H,
    dtype: torch.dtype = BF16,
    masked: bool = False,
    composed: bool = False,
) -> tuple[Measured, Measured]:
    q, k, v = heads(H, dtype), heads(kv_heads, dtype), heads(kv_heads, dtype)
    mask = torch.empty(S, S, dtype=dtype, device="phantom") if masked else None
    out: list[torch.Tensor] = []

    def forward() -> None:
        grouped = kv_heads != H
        kwargs = {"attn_mask": mask, "enable_gqa": grouped, "is_causal": not masked}
        every = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with sdpa_kernel(SDPBackend.MATH if composed else [*every, SDPBackend.MATH]):
            out.append(F.scaled_dot_product_attention(q, k, v, **kwargs))

    def backward() -> list[torch.Tensor]:
        gradient = torch.empty_like(out[0])
        # What the forward kept stays, so that it does not count here.
        return list(torch.autograd.grad(out[0], (q, k, v), gradient, True))

    return measured(forward), measured(backward)


def test_flash_attention_keeps_the_logsumexp(phantom: PhantomOf):
    forward, backward = phantom("meta", **PLAIN).run(attention)
    kept = HEADS + ROWS + 2 * SMALLEST
    assert forward == (kept, kept)
    # dq, dk, dv; the gradient, an fp32 accumulator of dq and a sum a row
    assert backward == (3 * HEADS, 3 * HEADS + HEADS + 2 * HEADS + ROWS)


def test_grouped_flash_attention_expands_the_gradients_of_keys(phantom: PhantomOf):
    _, backward = phantom("meta", **PLAIN).run(attention, kv_heads=2)
    results = HEADS + 2 * HEADS // 4
    held = HEADS + 2 * HEADS + ROWS + 2 * HEADS
    assert backward == (results, results + held)


def test_composed_attention_keeps_the_probabilities(phantom: PhantomOf):
    forward, _ = phantom("meta", **PLAIN).run(attention, composed=True)
    assert forward[0] > B * H * S * S * 2
    grouped, _ = phantom("meta", **PLAIN).run(
        attention, kv_heads=2, dtype=torch.float32
    )
    assert grouped[0] > B * H * S * S * 4


# -- normalisation, activations, dropout ----------------------------------------------


def normalised(kind: str) -> tuple[Measured, Measured]:
    x = torch.empty(4096, 1024, dtype=BF16, device="phantom", requires_grad=True)
    w = torch.empty(1024, dtype=BF16, device="phantom", requires_grad=True)
    out: list[torch.Tensor] = []

    def forward() -> None:
        if kind == "rms_norm":
            out.append(F.rms_norm(x, (1024,), w))
        else:
            out.append(F.layer_norm(x, (1024,), w, w))

    def backward() -> list[torch.Tensor]:
        return list(torch.autograd.grad(out[0], (x, w), out[0].detach(), True))

    return measured(forward), measured(backward)


@pytest.mark.parametrize(("kind", "statistics"), [("rms_norm", 1), ("layer_norm", 2)])
def test_norms_keep_fp32_statistics_alone(phantom: PhantomOf, kind, statistics):
    forward, backward = phantom("meta", **PLAIN).run(normalised, kind)
    size, row = 4096 * 1024 * 2, 4096 * 4
    assert forward == (size + statistics * row, size + statistics * row)
    # layer_norm's weight is its bias too: their gradients are summed
    assert backward[0] == size + 1024 * 2
    assert backward[1] <= backward[0] + 2 * 1024 * 2


def dropped() -> Measured:
    x = torch.empty(MIB, dtype=BF16, device="phantom", requires_grad=True)
    return measured(lambda: F.dropout(x, 0.1))


def test_dropout_keeps_a_mask_of_bytes(phantom: PhantomOf):
    assert phantom("meta", **PLAIN).run(dropped) == (3 * MIB, 3 * MIB)


# -- matrix products ------------------------------------------------------------------


def products() -> dict[str, int]:
    a = torch.empty(64, 64, device="phantom", requires_grad=True)
    side = torch.Stream("phantom")
    found = {"forward": measured(lambda: (a @ a).sum())[0]}
    held = torch.accelerator.memory_allocated()
    a @ a
    found["again"] = torch.accelerator.memory_allocated() - held
    (a @ a).sum().backward()
    found["backward"] = torch.accelerator.memory_allocated() - held - 64 * 64 * 4
    held = torch.accelerator.memory_allocated()
    with side:
        a.detach() @ a.detach()
    found["another stream"] = torch.accelerator.memory_allocated() - held
    held = torch.accelerator.memory_allocated()
    torch.phantom.clear_cublas_workspaces()
    found["cleared"] = held - torch.accelerator.memory_allocated()
    return found


def test_each_thread_and_stream_has_a_cublas_workspace(phantom: PhantomOf):
    found = phantom("meta").run(products)
    workspace = 32 * MIB
    assert found == {
        "forward": workspace + SMALLEST,
        "again": 0,
        "backward": workspace,
        "another stream": workspace,
        "cleared": 3 * workspace,
    }


def test_cublas_workspaces_are_configured_as_for_cuda(monkeypatch):
    from support.ranks import RankPool

    with RankPool(
        1, group=False, env={"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}
    ) as pool:
        assert pool.run(first_workspace) == [(8192 + 128) * 1024]


def first_workspace() -> int:
    import lowtide.phantom

    lowtide.phantom.install("meta")
    a = torch.empty(64, 64, device="phantom")
    out = torch.empty_like(a)
    return measured(lambda: torch.mm(a, a, out=out))[0]


# -- products into a wider result -----------------------------------------------------


def wide_products() -> list[Measured]:
    a = torch.empty(64, 128, dtype=BF16, device="phantom")
    b = torch.empty(128, 32, dtype=BF16, device="phantom")
    out = torch.empty(64, 32, dtype=torch.float32, device="phantom")
    return [
        measured(lambda: torch.mm(a, b, out_dtype=torch.float32)),
        measured(lambda: torch.mm(a, b, out_dtype=torch.float32, out=out)),
        measured(lambda: torch.addmm(out, a, b, out_dtype=torch.float32)),
        measured(lambda: torch.addmm(out, a, b, out_dtype=torch.float32, out=out)),
    ]


def test_products_into_fp32_hold_their_result_alone(phantom: PhantomOf):
    result = 64 * 32 * 4
    assert phantom("meta", **PLAIN).run(wide_products) == [
        (result, result),
        (0, 0),
        (result, result),
        (0, 0),
    ]
