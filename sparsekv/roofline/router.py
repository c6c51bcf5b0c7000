"""Which CPU region the next segment goes to, so that the running share follows its target."""

from __future__ import annotations

import math
from typing import Literal

from sparsekv.checks import check_share

_HALF = 0.5 + 1e-9
"""Shares like 0.1 do not add up exactly in binary: a hair below one half counts as one half."""


class ShareRouter:
    """Error diffusion over whole segments (arXiv:2609.14507, section 4.2: the marginal share).

    After every segment the number routed to the CPU's side differs from the sum of the shares in
    force at each of them by at most one half, also while the share changes; n segments at a
    constant share p therefore put round(p n) there.

    Raises:
        LayoutError: a share that is not a number in [0, 1].
    """

    def __init__(self, marginal_share: float) -> None:
        self._error = 0.0
        self.marginal_share = marginal_share

    @property
    def marginal_share(self) -> float:
        """Part of the segments to come that the CPU attends to."""
        return self._marginal_share

    @marginal_share.setter
    def marginal_share(self, share: float) -> None:
        check_share("marginal_share", share)
        self._marginal_share = float(share)

    @property
    def error(self) -> float:
        """Sum of shares less segments on the CPU's side, in [-1/2, 1/2]. Set it to forget dropped
        segments.
        """
        return self._error

    @error.setter
    def error(self, error: float) -> None:
        self._error = error

    def divert(self) -> None:
        """Send the segment that was just routed to the GPU's side to the CPU's after all, because
        there is no memory for it on the other. At most half a segment of that is made up for later.
        """
        self._error = max(self._error - 1.0, -0.5)

    def count_pinned(self, num_segments: int) -> int:
        """How many of the next segments would go to the GPU's side if the share stays."""
        num_unpinned = math.floor(self._error + num_segments * self._marginal_share + _HALF)
        return num_segments - min(max(num_unpinned, 0), num_segments)

    def route(self) -> Literal["unpinned", "pinned"]:
        """Place the next segment."""
        self._error += self._marginal_share
        if self._error >= 1.0 - _HALF:
            self._error -= 1.0
            return "unpinned"
        return "pinned"
