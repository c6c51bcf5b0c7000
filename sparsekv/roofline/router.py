"""Which CPU region the next segment goes to, so that the running share follows its target."""

from __future__ import annotations

from typing import Literal

from sparsekv.checks import check_share


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

    def route(self) -> Literal["unpinned", "pinned"]:
        """Place the next segment."""
        self._error += self._marginal_share
        # Shares like 0.1 do not add up exactly in binary: a hair below one half counts as one half.
        if self._error >= 0.5 - 1e-9:
            self._error -= 1.0
            return "unpinned"
        return "pinned"
