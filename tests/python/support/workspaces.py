"""cuBLAS's workspaces: up to torch 2.14 each stream and thread that multiplies keeps
one, from 2.15 on a product has one while it runs."""

from lowtide._torch_version import VERSION

KEPT = VERSION < (2, 15)
HOPPER = 32 << 20  # bytes of one


def kept(count: int) -> int:
    """Bytes that ``count`` of them hold between products."""
    return count * HOPPER if KEPT else 0
