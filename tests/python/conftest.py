"""Shared by all Python tests.  Each test ends after `timeout` seconds
(pyproject.toml); tests that start ranks set a shorter limit for these."""
