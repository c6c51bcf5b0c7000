"""How bytes move between host regions and the accelerator."""

from sparsekv.transfer.stream import stream

__all__ = ["stream"]
