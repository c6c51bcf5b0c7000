"""Small host memory that the accelerator reads and writes: flags, queries, results, segments on
their way.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsekv.device import Accelerator
from sparsekv.regions.memory import HUGE_PAGE_BYTES, Mapping


def buffer_mapping(accelerator: Accelerator, shape: Sequence[int], dtype: torch.dtype) -> Mapping:
    """Host memory of zeros for one buffer, to be registered as one piece.

    Raises:
        CapacityError: the system has no addresses left.
    """
    num_bytes = max(math.prod(shape), 1) * dtype.itemsize
    mapping = Mapping(num_bytes, (num_bytes, accelerator.device.type))
    mapping.advise_huge(num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return mapping


def buffer_on(mapping: Mapping, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The buffer for which a mapping was made; the mapping ends with the last tensor on it."""
    buffer = (ctypes.c_char * mapping.num_bytes).from_address(mapping.address)
    # At exit the process ends with its registrations; tensors may still be read till then.
    weakref.finalize(buffer, mapping.unmap).atexit = False
    # What is made under inference_mode could never be written to outside it.
    with torch.inference_mode(False):
        elements = torch.frombuffer(buffer, dtype=dtype)
    return elements[: math.prod(shape)].view(tuple(shape))
