"""How bytes move between host regions and the accelerator."""

from sparsekv.transfer.in_place import reads_in_place
from sparsekv.transfer.stream import stream

__all__ = ["reads_in_place", "stream"]
