"""Registration with the accelerator, as one cache does it: how long it took, and whether the system
refuses it.
"""

from __future__ import annotations

import logging
import time

from sparsekv.device import Accelerator
from sparsekv.errors import CapacityError
from sparsekv.regions.pool import Lease

logger = logging.getLogger(__name__)


class RegistrationRefused(CapacityError):
    """The system does not page-lock as much as asked; the same bytes may live unpinned."""


class Registrar:
    """Registers the memory of one cache's pinned region with its accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.longest_s = 0.0
        """The longest that one registration took; no kernel can be launched meanwhile."""
        self.is_refused = False
        """Whether the system refused a single segment: no more is asked for until `retry`."""
        self._has_warned = False

    def register(self, lease: Lease, end: int) -> None:
        """Register a mapping from where it is registered up to byte `end`.

        Raises:
            RegistrationRefused: the system refuses; what was registered before stays so.
        """
        lease.touch(end).wait()
        began = time.perf_counter()
        try:
            lease.mapping.register(self.accelerator, end)
        except CapacityError as error:
            raise RegistrationRefused(*error.args) from error
        finally:
            self.longest_s = max(self.longest_s, time.perf_counter() - began)

    def give_up(self, error: RegistrationRefused) -> None:
        """Ask for no more from here on, and say so once."""
        self.is_refused = True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s. Segments that find no registered memory go to the unpinned region instead, "
                "where the CPU attends to them: the CPU's share is above its target from here on "
                "(said once)",
                error,
            )

    def retry(self) -> None:
        """Ask again: others may have freed what was short."""
        self.is_refused = False
