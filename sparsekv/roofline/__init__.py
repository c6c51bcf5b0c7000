"""How much goes where. Numbers only: no tensor, no device."""

from sparsekv.roofline.cost_model import CostModel
from sparsekv.roofline.router import ShareRouter

__all__ = ["CostModel", "ShareRouter"]
