"""Helpers of the tests and benchmarks that train on several ranks."""
