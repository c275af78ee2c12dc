"""Tests of properties take as long as the machine lets them."""

from hypothesis import settings

settings.register_profile("lowtide", deadline=None)
settings.load_profile("lowtide")
