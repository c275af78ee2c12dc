"""Which lines decide by a number that was read, after the program's source."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.planning.decisions import lines_that_decide

# Each reads in its first line; "<" marks the lines that decide by it.
SHOWN = (
    "loss = loss.item()\nlog = {'loss': loss, 'at': at}\nassert log['at']",
    "print(loss.item())",
    "text = f'{loss.item():.3f}' if rank == 0 else ''",
    "total += loss.item()\nif step % 10 == 0:\n    print(total / 10)",
    "losses.append(loss.item())\nif len(losses) > 3:\n    pass",
    "losses.append(loss.item())\nfor each in losses:\n    print(each)",
    "loss = loss.item()\nif loss is not None:\n    print(loss)",
    "self.loss = loss.item()\nif outputs.loss > 0:\n    pass",
    "def mean():\n    return loss.item()\nprint(mean())",
)
DECIDING = (
    "kept['a'] = loss.item()\nif kept['a'] < best:  # <\n    pass",
    "kept.append(loss.item())\nfirst, *rest = kept\nassert rest[0] > 1  # <",
    "if loss.item() < 5:  # <\n    pass",
    "while float(norm) > 1:  # <\n    pass",
    "best = max(best, loss.item())\nif best < 1:  # <\n    pass",
    "value = loss.item()\nmean = value / 2\nworse = mean > last  # <",
    "self.loss = loss.item()\ndef done(self):\n    return self.loss < 1  # <",
    "def read(): return loss.item()\ndef other():\n    return read() > 3  # <",
    "def read(self): return loss.item()\ndef f(self):\n    assert self.read()  # <",
    "assert loss.item() == loss.item()  # <",
    "x, value = 1, loss.item()\nassert value  # <",
    "kept = [x for x in range(9) if x < loss.item()]  # <",
)


def decided(folder: Path, text: str) -> list[int]:
    (folder / "train.py").write_text(text)
    return lines_that_decide(str(folder / "train.py"), 1)


@pytest.mark.parametrize("text", SHOWN)
def test_a_number_that_is_shown_decides_nothing(tmp_path, text):
    assert decided(tmp_path, text) == []


@pytest.mark.parametrize("text", DECIDING)
def test_a_number_is_followed_to_what_decides(tmp_path, text):
    lines = enumerate(text.splitlines(), start=1)
    assert decided(tmp_path, text) == [n for n, line in lines if "# <" in line]


def test_names_of_another_function_are_others(tmp_path):
    text = "def a(): x = loss.item()\ndef b(x):\n    if x:\n        pass"
    assert decided(tmp_path, text) == []


def test_without_source_nothing_is_said(tmp_path):
    assert lines_that_decide(str(tmp_path / "none.py"), 1) == []
    assert decided(tmp_path, "if loss.item(:") == []
