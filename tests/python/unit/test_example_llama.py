"""examples/llama.py is the model it says it is."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from llama import CONFIGS, Attention, Llama, init_weights, rope_table, rotate

TINY = CONFIGS["tiny"]


def tokens(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, TINY.vocab_size, (2, count), generator=generator)


def tiny(seed: int = 0) -> Llama:
    model = Llama(TINY)
    init_weights(model, seed)
    return model


@pytest.mark.parametrize(
    ("name", "count"),
    [("bytes", 1_672_896), ("8b", 8_030_261_248), ("70b", 70_553_706_496)],
)
def test_configs_have_the_published_number_of_parameters(name, count):
    with torch.device("meta"):
        model = Llama(CONFIGS[name])
    assert sum(p.numel() for p in model.parameters()) == count
    assert all(len(list(block.parameters())) == 9 for block in model.layers)


def test_weights_are_a_function_of_seed_and_name():
    with torch.device("meta"):
        from_meta = Llama(TINY)
    from_meta.to_empty(device="cpu")
    init_weights(from_meta, seed=3)
    model, other = tiny(seed=3), tiny(seed=4)
    assert torch.equal(from_meta.rope, model.rope)
    theirs, others = dict(from_meta.named_parameters()), dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
        assert torch.equal(parameter, others[name]) == ("norm" in name), name


def test_a_logit_depends_on_no_later_token():
    model = tiny()
    before = tokens(12)
    after = before.clone()
    after[:, 7:] = (after[:, 7:] + 1) % TINY.vocab_size
    first, second = model(before), model(after)
    assert torch.equal(first[:, :7], second[:, :7])
    assert (first[:, 7:] != second[:, 7:]).any(-1).all()


def test_rope_keeps_lengths_and_sees_only_distances():
    rope = rope_table(TINY)
    q, k = torch.randn(2, 1, 1, 1, TINY.head_dim).expand(-1, -1, 32, -1, -1)
    rotated_q, rotated_k = rotate(q, rope[:32]), rotate(k, rope[:32])
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm(dim=-1))
    scores = torch.einsum("bshd,bthd->st", rotated_q, rotated_k)
    for distance in (0, 5, -9):
        same = scores.diagonal(distance)
        torch.testing.assert_close(same, same[:1].expand_as(same))
    assert not torch.allclose(scores.diagonal(1), scores.diagonal(2)[:1])


def test_key_and_value_heads_serve_groups_of_query_heads():
    config = dataclasses.replace(TINY, num_heads=4, num_kv_heads=2)
    attention = Attention(config)
    x, rope = torch.randn(1, 6, config.dim), rope_table(config)[:6]

    def heads(weight: torch.nn.Linear) -> torch.Tensor:
        return weight(x).unflatten(-1, (-1, config.head_dim))

    q = rotate(heads(attention.wq), rope).transpose(1, 2)
    k = rotate(heads(attention.wk), rope).transpose(1, 2)[:, [0, 0, 1, 1]]
    v = heads(attention.wv).transpose(1, 2)[:, [0, 0, 1, 1]]
    scores = q @ k.mT / config.head_dim**0.5
    scores += torch.full((6, 6), float("-inf")).triu(1)
    expected = attention.wo((F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, rope), expected)


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match=r"expected at most 128 tokens .* got 129"):
        tiny()(torch.zeros(1, 129, dtype=torch.long))
