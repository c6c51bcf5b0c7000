"""Buffers that grow at their end."""

from __future__ import annotations

import torch

from sparsekv.csa.buffer import GrowingBuffer
from sparsekv.device import SimulatedAccelerator


def test_what_was_appended_is_there_however_it_came() -> None:
    buffer = GrowingBuffer(SimulatedAccelerator(), 2, 3, torch.float32)
    pieces = [torch.randn(2, n, 3) for n in (0, 1, 5, 1, 1, 40, 2)]
    for piece in pieces:
        buffer.append(piece)
    assert torch.equal(buffer.entries, torch.cat(pieces, 1))
    buffer.truncate(7)
    buffer.append(pieces[2])
    assert torch.equal(buffer.entries, torch.cat([*pieces[:4], pieces[2]], 1)[:, :12])


def test_what_is_expected_is_taken_at_once_and_no_more() -> None:
    buffer = GrowingBuffer(SimulatedAccelerator(), 2, 3, torch.float32)
    buffer.expected = 100
    buffer.append(torch.zeros(2, 90, 3))
    assert buffer.num_bytes == 2 * 100 * 3 * 4
    for _ in range(10):
        buffer.append(torch.zeros(2, 1, 3))
    assert buffer.num_bytes == 2 * 100 * 3 * 4
    buffer.append(torch.zeros(2, 1, 3))
    assert buffer.num_bytes == 2 * 150 * 3 * 4


def test_rows_are_selected_with_their_room() -> None:
    buffer = GrowingBuffer(SimulatedAccelerator(), 2, 3, torch.float32)
    buffer.expected = 10
    buffer.append(torch.randn(2, 4, 3))
    chosen = buffer.select_rows(torch.tensor([1, 1, 0]))
    assert torch.equal(chosen.entries, buffer.entries[[1, 1, 0]])
    assert chosen.num_bytes == 3 * 10 * 3 * 4
