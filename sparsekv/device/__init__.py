"""The accelerator: CUDA, or a simulated one that keeps the same regions in ordinary memory.

Everything that allocates on the accelerator, copies to or from it, orders work on it, or registers
host memory goes through here, so that bytes are counted in one place and tests can delay each
operation or make it fail.
"""

from sparsekv.device.accelerator import Accelerator
from sparsekv.device.choice import open_accelerator
from sparsekv.device.cuda import CudaAccelerator, CudaStream
from sparsekv.device.simulated import SimulatedAccelerator, SimulatedStream
from sparsekv.device.stream import Event, Stream, TimedEvent

__all__ = [
    "Accelerator",
    "CudaAccelerator",
    "CudaStream",
    "Event",
    "SimulatedAccelerator",
    "SimulatedStream",
    "Stream",
    "TimedEvent",
    "open_accelerator",
]
