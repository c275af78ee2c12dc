"""`make test` runs the quick tests; see support/selection.py for which those are."""

from __future__ import annotations

import pytest

from support import selection


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    selection.select(config, items)
