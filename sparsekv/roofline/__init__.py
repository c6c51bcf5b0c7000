"""How much goes where. Numbers only: no tensor, no device."""

from sparsekv.roofline.cost_model import CostModel
from sparsekv.roofline.cost_tracker import CostTracker
from sparsekv.roofline.machine import MachineProfile, flops_per_byte
from sparsekv.roofline.machines import PRESETS
from sparsekv.roofline.router import ShareRouter

__all__ = [
    "PRESETS",
    "CostModel",
    "CostTracker",
    "MachineProfile",
    "ShareRouter",
    "flops_per_byte",
]
