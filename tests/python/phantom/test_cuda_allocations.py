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


def strided_operands() -> list[Measured]:
    a = torch.empty(1024, 1024, dtype=BF16, device="phantom")
    expanded = torch.empty(1, 1, dtype=BF16, device="phantom").expand(1024, 1024)
    batched = expanded.expand(4, 1024, 1024)
    b = torch.empty(4, 1024, 1024, dtype=BF16, device="phantom")
    return [
        measured(lambda: a @ a.t()),
        measured(lambda: a[:, :512] @ a[:512]),
        measured(lambda: expanded @ a),
        measured(lambda: batched @ b),
    ]


def test_what_cublas_cannot_take_is_copied(phantom: PhantomOf):
    assert phantom("meta", **PLAIN).run(strided_operands) == [
        *((2 * MIB, 2 * MIB), (2 * MIB, 2 * MIB)),
        *((2 * MIB, 4 * MIB), (8 * MIB, 16 * MIB)),
    ]


# -- embedding, indexing, loss --------------------------------------------------------


def embedded(count: int) -> Measured:
    weight = torch.empty(16384, 512, dtype=BF16, device="phantom", requires_grad=True)
    rows = torch.zeros(count, dtype=torch.int64, device="phantom")
    y = F.embedding(rows, weight)
    return measured(lambda: torch.autograd.grad(y, weight, y.detach()))


def test_embedding_backward_sorts_many_rows(phantom: PhantomOf):
    table = 16384 * 512 * 2
    assert phantom("meta", **PLAIN).run(embedded, 3072) == (table, table)
    count = 4096
    partial = count // 10 + count
    sums = partial * 512 * 4
    # sorted, origin, segments, sums of segments and their offsets; partial offsets
    indices = 5 * count * 8 + -(-partial * 8 // SMALLEST) * SMALLEST
    kept, peak = phantom("meta", **PLAIN).run(embedded, count)
    assert (kept, peak) == (table, table + indices + sums)


def accumulated() -> list[Measured]:
    x = torch.empty(100, 4, device="phantom")
    rows = torch.zeros(65536, dtype=torch.int64, device="phantom")
    values = torch.empty(65536, 4, device="phantom")
    return [
        measured(lambda: x.index_put_((rows,), values)),
        measured(lambda: x.index_put_((rows,), values, accumulate=True)),
    ]


def test_accumulating_index_put_sorts(phantom: PhantomOf):
    replaced, summed = phantom("meta", **PLAIN).run(accumulated)
    assert replaced == (0, 0)
    assert summed == (0, 4 * 65536 * 8)


def losses() -> tuple[Measured, Measured]:
    logits = torch.empty(1024, 8192, dtype=BF16, device="phantom", requires_grad=True)
    targets = torch.zeros(1024, dtype=torch.int64, device="phantom")
    out: list[torch.Tensor] = []

    def forward() -> None:
        out.append(F.cross_entropy(logits.float(), targets))

    return measured(forward), measured(out[0].backward if out else lambda: None)


def test_cross_entropy_keeps_the_log_probabilities(phantom: PhantomOf):
    forward, _ = phantom("meta", **PLAIN).run(losses)
    fp32 = 1024 * 8192 * 4
    assert forward == (fp32 + 2 * SMALLEST, 2 * fp32 + 2 * SMALLEST)


# -- optimizers and copies ------------------------------------------------------------


def optimised(**kind: bool) -> Measured:
    p = torch.nn.Parameter(torch.empty(MIB, device="phantom"))
    p.grad = torch.empty_like(p)
    optimizer = torch.optim.AdamW([p], **kind)
    optimizer.step()
    return measured(optimizer.step)


def test_adamw(phantom: PhantomOf):
    process = phantom("meta", **PLAIN)
    assert process.run(optimised, fused=True) == (0, 0)
    assert process.run(optimised) == (0, 4 * MIB)  # foreach
    assert process.run(optimised, foreach=False) == (0, 8 * MIB)


def clipped() -> Measured:
    parameters = [torch.nn.Parameter(torch.empty(MIB, device="phantom"))] * 3
    for p in parameters:
        p.grad = torch.empty_like(p)
    return measured(lambda: torch._foreach_norm([p.grad for p in parameters]))


def test_the_norm_of_many_tensors_has_partial_results(phantom: PhantomOf):
    kept, peak = phantom("meta", **PLAIN).run(clipped)
    assert (kept, peak) == (3 * SMALLEST, 4 * SMALLEST)


def transfers() -> dict[str, Measured]:
    device = torch.empty(MIB, dtype=BF16, device="phantom")
    square = torch.empty(1024, 1024, dtype=BF16, device="phantom")
    host = torch.empty(MIB, dtype=BF16)
    wide = torch.empty(MIB)
    return {
        "same": measured(lambda: host.copy_(device)),
        "converted on the host": measured(lambda: wide.copy_(device)),
        "converted on the device": measured(
            lambda: wide.copy_(device, non_blocking=True)
        ),
        "transposed": measured(lambda: host.view(1024, 1024).copy_(square.t())),
        "to the device": measured(lambda: device.copy_(host)),
        "converted there": measured(lambda: device.copy_(wide, non_blocking=True)),
        "converted before": measured(lambda: device.copy_(wide)),
        "to a transposed one": measured(lambda: square.t().copy_(host.view(1024, -1))),
    }


def test_transfers_are_staged_where_cuda_stages_them(phantom: PhantomOf):
    assert phantom("meta", **PLAIN).run(transfers) == {
        "same": (0, 0),
        "converted on the host": (0, 0),
        "converted on the device": (0, 4 * MIB),
        "transposed": (0, 2 * MIB),
        "to the device": (0, 0),
        "converted there": (0, 4 * MIB),
        "converted before": (0, 0),
        "to a transposed one": (0, 2 * MIB),
    }


def sharded_copies() -> dict[str, Measured]:
    pieces = [torch.empty(n, 256, device="phantom") for n in (1000, 24, 3)]
    out = torch.empty(8, (125 + 3 + 1) * 256, device="phantom")
    flat = torch.empty(2, 1024, device="phantom")
    parts = [torch.empty(2, n, device="phantom") for n in (1000, 24)]
    return {
        "chunk_cat": measured(
            lambda: torch._chunk_cat(pieces, dim=0, num_chunks=8, out=out)
        ),
        "split_with_sizes_copy": measured(
            lambda: torch.split_with_sizes_copy(flat, [1000, 24], dim=1, out=parts)
        ),
        "foreach_copy": measured(lambda: torch._foreach_copy_(parts, parts)),
    }


def test_sharded_copies_have_no_temporaries(phantom: PhantomOf):
    found = phantom("meta", **PLAIN).run(sharded_copies)
    assert found == dict.fromkeys(found, (0, 0))


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
