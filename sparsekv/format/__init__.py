"""What is stored and where: geometry, sizes, placement and views. Integers and views only; no
memory is owned here.
"""

from sparsekv.format.geometry import KVGeometry
from sparsekv.format.partition import Footprint, PartitionSpec
from sparsekv.format.placement import Placement, RegionName, SegmentPlace
from sparsekv.format.statistics import CacheStats, RegionStats, ShareStats
from sparsekv.format.views import KVView, LayerViews, joined

__all__ = [
    "CacheStats",
    "Footprint",
    "KVGeometry",
    "KVView",
    "LayerViews",
    "PartitionSpec",
    "Placement",
    "RegionName",
    "RegionStats",
    "SegmentPlace",
    "ShareStats",
    "joined",
]
