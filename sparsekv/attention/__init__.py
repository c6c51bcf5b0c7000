"""Attention over a cache that lies in several places: one partial result each, merged exactly."""

from sparsekv.attention.merge import merge_partials
from sparsekv.attention.split import split_attention

__all__ = ["merge_partials", "split_attention"]
