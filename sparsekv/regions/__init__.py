"""Where bytes live: the window and the ping-pong buffers on the accelerator, the two stacks in host
memory; and the way between them.
"""

from sparsekv.regions.eviction import evict
from sparsekv.regions.layer import LayerParts, LayerStore, Progress
from sparsekv.regions.outbox import Outbox
from sparsekv.regions.ping_pong import PingPong
from sparsekv.regions.pinned import PinnedStack
from sparsekv.regions.pool import RegionPool
from sparsekv.regions.registration import Registrar
from sparsekv.regions.stack import SegmentStack
from sparsekv.regions.window import Window, lay_out_windows

__all__ = [
    "LayerParts",
    "LayerStore",
    "Outbox",
    "PingPong",
    "PinnedStack",
    "Progress",
    "RegionPool",
    "Registrar",
    "SegmentStack",
    "Window",
    "evict",
    "lay_out_windows",
]
