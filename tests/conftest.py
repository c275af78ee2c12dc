"""`make test` runs the quick tests; see support/selection.py for which those are."""

from __future__ import annotations

import signal

import pytest

from support import selection


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Whom a shell starts in the background ignores interrupts, which tests raise."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    selection.select(config, items)
