"""Attention over a cache that lies in several places: one partial result each, merged exactly."""

from sparsekv.attention.decode import DecodeAttention
from sparsekv.attention.host import HostAttention, HostCalls
from sparsekv.attention.host_jobs import HostJobs
from sparsekv.attention.merge import merge_partials
from sparsekv.attention.split import split_attention
from sparsekv.attention.timings import Recent, Timing, Timings

__all__ = [
    "DecodeAttention",
    "HostAttention",
    "HostCalls",
    "HostJobs",
    "Recent",
    "Timing",
    "Timings",
    "merge_partials",
    "split_attention",
]
