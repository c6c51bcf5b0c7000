"""Which region each segment lives in, and which physical row holds each sequence.

One table serves all layers: layers see the same tokens, so segment i is in the same region in each
    of them. A
layer that has not reached segment i yet finds its place already decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RegionName = Literal["window", "unpinned", "pinned"]


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Where one segment lives, in every layer."""

    region: Literal["unpinned", "pinned"]
    num_rows: int
    """Physical rows written: the batch size when the segment left the window."""
    router_error: float
    """The router's error before this segment, to return to if the segment is cropped."""


class Placement:
    """The placement table and the row tables of a cache."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.places: list[SegmentPlace] = []
        self._rows: list[Tensor | None] = []
        self._found: tuple[int, dict[str, list[int]]] = (0, {})

    def __len__(self) -> int:
        return len(self.places)

    def add(self, place: SegmentPlace) -> None:
        """Append a segment whose physical rows are the present logical ones."""
        assert place.num_rows == self.batch_size, (place.num_rows, self.batch_size)
        self.places.append(place)
        self._rows.append(None)

    def truncate(self, num_segments: int) -> None:
        """Forget every segment from `num_segments` on."""
        del self.places[num_segments:]
        del self._rows[num_segments:]
        self._found = (0, {})

    def select_rows(self, indices: Tensor) -> Placement:
        """A table in which logical row b is what logical row `indices[b]` was; no byte moves.

        Covers reordering, selecting and repeating rows. Segments that share a row table before
        share one after.
        """
        chosen = indices.to("cpu", torch.int64)
        other = Placement(len(chosen))
        other.places = list(self.places)
        if torch.equal(chosen, torch.arange(self.batch_size)):
            other._rows = list(self._rows)
            return other
        made: dict[int, Tensor] = {}
        for rows in self._rows:
            if id(rows) not in made:
                made[id(rows)] = chosen if rows is None else rows[chosen]
            other._rows.append(made[id(rows)])
        return other

    def segments_in(self, region: str, num_segments: int) -> list[int]:
        """Which of the first `num_segments` are in a region: found once for all layers."""
        known, found = self._found
        if known != num_segments:
            found = {"unpinned": [], "pinned": []}
            for i, place in enumerate(self.places[:num_segments]):
                found[place.region].append(i)
            self._found = (num_segments, found)
        return found.get(region, [])

    def rows_of(self, segment_idx: int) -> Tensor | None:
        """(batch,) int64, logical row -> physical row of this segment; None: identity."""
        return self._rows[segment_idx]

    def all_row_tables(self) -> Tensor:
        """(num_segments, batch) int64, identities written out."""
        if not self._rows:
            return torch.zeros(0, self.batch_size, dtype=torch.int64)
        identity = torch.arange(self.batch_size)
        return torch.stack([identity if rows is None else rows for rows in self._rows])

    def set_row_tables(self, tables: Tensor) -> None:
        """Inverse of `all_row_tables`; equal neighbours share one table again, identities become
        None.
        """
        identity, last = torch.arange(self.batch_size), None
        self._rows = []
        for place, rows in zip(self.places, tables, strict=True):
            if place.num_rows == self.batch_size and torch.equal(rows, identity):
                self._rows.append(None)
                continue
            if last is None or not torch.equal(rows, last):
                last = rows.clone()
            self._rows.append(last)

    def copy(self) -> Placement:
        """An independent table with the same content (row tables are never written in place)."""
        return self.select_rows(torch.arange(self.batch_size))
