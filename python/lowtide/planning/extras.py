"""Packages that only people who look at plans need."""

import importlib.util


def require(package: str) -> None:
    """Raises ImportError that says how to get it."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"lowtide: plan: expected the package {package}, got none. Run "
            "`pip install 'lowtide[plan]'`, or call lowtide.plan from Python, which "
            "needs neither rich nor matplotlib."
        )
