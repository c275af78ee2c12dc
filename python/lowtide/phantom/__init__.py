"""A simulated accelerator: what CUDA's caching allocator would reserve, and how long a
step would take, without a GPU.

Loaded only on request (``import lowtide.phantom``).
"""

from lowtide.phantom.allocator import AllocatorModel
from lowtide.phantom.clock import timeline
from lowtide.phantom.device import install
from lowtide.phantom.world import init_world

__all__ = ["AllocatorModel", "init_world", "install", "timeline"]
