"""Losses that never hold the logits of a whole batch."""

from lowtide.losses._sharded import stream_rows
from lowtide.losses.deferred import defer_logits
from lowtide.losses.linear import linear_cross_entropy

__all__ = ["defer_logits", "linear_cross_entropy", "stream_rows"]
