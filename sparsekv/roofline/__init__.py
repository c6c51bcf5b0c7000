"""How much goes where. Numbers only: no tensor, no device."""

from sparsekv.roofline.calibration import Calibration, ProfileKey, profile_folder
from sparsekv.roofline.cost_model import CostModel
from sparsekv.roofline.cost_tracker import CostTracker
from sparsekv.roofline.least_squares import CalibrationPoint, fit
from sparsekv.roofline.machine import MachineProfile, flops_per_byte
from sparsekv.roofline.machines import PRESETS
from sparsekv.roofline.router import ShareRouter

__all__ = [
    "PRESETS",
    "Calibration",
    "CalibrationPoint",
    "CostModel",
    "CostTracker",
    "MachineProfile",
    "ProfileKey",
    "ShareRouter",
    "fit",
    "flops_per_byte",
    "profile_folder",
]
