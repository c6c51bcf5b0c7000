"""Registration with the accelerator, as one cache does it: how much, how long it took, and what the
system refuses.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsekv.device import Accelerator
from sparsekv.errors import CapacityError
from sparsekv.regions.host_buffer import buffer_mapping, buffer_on
from sparsekv.regions.memory import Mapping
from sparsekv.regions.pool import Lease

NUM_FLAGS = 256

logger = logging.getLogger(__name__)


class RegistrationRefused(CapacityError):
    """The system does not page-lock as much as asked; the same bytes may live unpinned."""


class Registrar:
    """Registers the memory of one cache with its accelerator: that of the pinned region, and the
    buffers through which evicted windows, queries and results pass.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.longest_s = 0.0
        """The longest that one registration took; no kernel can be launched meanwhile."""
        self.is_refused = False
        """Whether the system refused a single segment: no more is asked for until `retry`."""
        self.flags: Tensor | None = None
        """(2, NUM_FLAGS) int32 of registered memory: those of the CPU's jobs, and those of
        evictions; None: nobody has made them.
        """
        self._refused_bytes: int | None = None
        self._buffers: list[Mapping] = []
        self._has_warned = False

    @property
    def buffer_bytes(self) -> int:
        """Registered bytes of the buffers that somebody still holds."""
        self._buffers = [mapping for mapping in self._buffers if mapping.registered_bytes]
        return sum(mapping.registered_bytes for mapping in self._buffers)

    def register(self, lease: Lease, end: int) -> None:
        """Register a mapping from where it is registered up to byte `end`.

        Raises:
            RegistrationRefused: the system refuses; what was registered before stays so.
        """
        lease.touch(end).wait()
        self._register(lease.mapping, end)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Host memory of zeros, registered as one piece; freed with the last tensor on it.

        Made once and kept: registering stalls the device for about a millisecond.

        Returns:
            None: the system refuses to register it, or has refused less; the caller does without,
            and who reads the log knows.
        Raises:
            CapacityError: the system has no addresses left.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._refused_bytes is not None and num_bytes >= self._refused_bytes:
            return None
        mapping = buffer_mapping(self.accelerator, shape, dtype)
        try:
            self._buffers.append(mapping)  # it counts as soon as it is registered
            self._register(mapping, mapping.num_bytes)
            return buffer_on(mapping, shape, dtype)
        except RegistrationRefused as error:
            mapping.unmap()
            self._refused_bytes = num_bytes
            self._warn(error)
            return None
        except BaseException:
            mapping.unmap()
            raise

    def make_flags(self) -> Tensor | None:
        """The flags; None as `buffer`."""
        if self.flags is None:
            self.flags = self.buffer((2, NUM_FLAGS), torch.int32)
        return self.flags

    def give_up(self, error: RegistrationRefused) -> None:
        """Ask for no more segments from here on, and say so once."""
        self.is_refused = True
        self._warn(error)

    def retry(self) -> None:
        """Ask again: others may have freed what was short."""
        self.is_refused = False
        self._refused_bytes = None

    def _register(self, mapping: Mapping, end: int) -> None:
        began = time.perf_counter()
        try:
            mapping.register(self.accelerator, end)
        except CapacityError as error:
            raise RegistrationRefused(*error.args) from error
        finally:
            self.longest_s = max(self.longest_s, time.perf_counter() - began)

    def _warn(self, error: RegistrationRefused) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s. Segments that find no registered memory go to the unpinned region instead, "
                "where the CPU attends to them: the CPU's share is above its target from here on. "
                "Without registered buffers the calling thread waits for copies to that region, "
                "and for the CPU's attention (said once)",
                str(error),  # whoever keeps the record would keep the cache, which its frames hold
            )
