"""examples/text.py: which bytes a rank trains on."""

import pytest
import torch

import text


def write(root, contents):
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def names_of(validation: bool, count: int) -> list[str]:
    every = (f"module_{i}.py" for i in range(10_000))
    return [n for n in every if text.is_validation(n) == validation][:count]


def sampler(**changes) -> text.Sampler:
    settings = {
        "text": torch.randint(0, 256, (5000,), dtype=torch.uint8),
        "seq_len": 16,
        "batch_size": 4,
        "num_microbatches": 1,
        "num_ranks": 2,
        "seed": 0,
    }
    return text.Sampler(**(settings | changes))


def test_the_standard_library_is_enough_to_train_on():
    corpus = text.load()
    assert len(corpus.train) > 2 << 20
    assert 20_000 < len(corpus.validation) < len(corpus.train) / 5
    assert corpus.train.dtype == corpus.validation.dtype == torch.uint8
    assert text.load().sha256 == corpus.sha256


def test_a_file_is_either_trained_or_validated_on(tmp_path):
    train, validation = names_of(False, 2), names_of(True, 2)
    write(tmp_path, {name: name + "\n" for name in train + validation})
    write(tmp_path, {"test/test_x.py": "no", "a/idlelib/y.py": "no", "readme": "no"})
    corpus = text.load(tmp_path)

    def content(tensor: torch.Tensor) -> str:
        return bytes(tensor.tolist()).decode()

    assert content(corpus.train) == "".join(name + "\n" for name in sorted(train))
    assert content(corpus.validation) == "".join(n + "\n" for n in sorted(validation))


def test_the_cap_counts_whole_files(tmp_path):
    train, validation = names_of(False, 1)[0], names_of(True, 1)[0]
    write(tmp_path, {train: "t" * 10, validation: "v" * 10, "z.py": "z" * 10})
    corpus = text.load(tmp_path, max_bytes=29)
    assert len(corpus.train) + len(corpus.validation) == 20


def test_a_folder_without_source_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"got 0 bytes .* Point --text"):
        text.load(tmp_path)


def test_targets_are_the_bytes_that_follow():
    source = sampler()
    inputs, targets = source.batch(step=3, microbatch=0, rank=1)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    whole = bytes(source.text.tolist())
    for row, following in zip(inputs, targets, strict=True):
        assert bytes([*row.tolist(), int(following[-1])]) in whole


def test_a_step_is_the_same_however_it_is_divided():
    content = torch.randint(0, 256, (5000,), dtype=torch.uint8)

    def step(num_ranks: int, num_microbatches: int, batch_size: int) -> torch.Tensor:
        divided = sampler(
            text=content,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            batch_size=batch_size,
        )
        return torch.cat(
            [
                divided.batch(5, microbatch, rank)[0]
                for microbatch in range(num_microbatches)
                for rank in range(num_ranks)
            ]
        )

    whole = step(1, 1, 12)
    assert len(whole.unique(dim=0)) == 12
    for division in ((2, 1, 6), (4, 1, 3), (2, 3, 2), (1, 12, 1)):
        assert torch.equal(step(*division), whole)


def test_seed_step_and_rank_change_the_batch():
    content = sampler().text
    batches = [
        sampler(text=content, seed=seed).batch(step, 0, rank)[0]
        for seed in (0, 1)
        for step in (0, 1)
        for rank in (0, 1)
    ]
    assert len(torch.cat(batches).unique(dim=0)) == 4 * len(batches)


def test_windows_to_validate_on_span_the_text():
    content = torch.arange(200, dtype=torch.uint8)
    inputs, targets = text.evenly_spaced(content, count=4, seq_len=20)
    assert inputs[:, 0].tolist() == [0, 45, 90, 135]
    assert torch.equal(targets, inputs + 1)


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match=r"expected more than 16 bytes .* got 16"):
        sampler(text=torch.zeros(16, dtype=torch.uint8))
