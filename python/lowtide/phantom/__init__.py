"""A simulated accelerator: what CUDA's caching allocator would reserve, without a GPU.

Loaded only on request (``import lowtide.phantom``).
"""

from lowtide.phantom.allocator import AllocatorModel

__all__ = ["AllocatorModel"]
