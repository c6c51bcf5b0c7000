"""One step, wired: configuration, and who computes what."""

from sparsekv.engine.config import CacheConfig
from sparsekv.engine.step import attend

__all__ = ["CacheConfig", "attend"]
