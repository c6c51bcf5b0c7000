"""Regions beyond 4 GiB, and views beyond 2**31 elements: offsets are wide enough everywhere.

All keys and values are zero, and so is attention to them, but for the last ones.
"""

import math

import pytest
import torch
from harness import build

from sparsekv.attention import merge_partials
from sparsekv.device import SimulatedAccelerator, open_accelerator
from sparsekv.engine import attend
from sparsekv.format import KVGeometry, PartitionSpec
from sparsekv.kernels import reference
from sparsekv.kernels.dispatch import partial_attention_for
from sparsekv.regions import RegionPool, SegmentStack
from sparsekv.regions.memory import PAGE_BYTES, Mapping
from sparsekv.regions.stack import split_elements

GIB = 1 << 30
QWEN3 = KVGeometry(num_layers=1, num_kv_heads=4, head_dim=128)
ROWS, WINDOW, SCALE = 16, 256, 0.09
SEGMENTS = 5 * GIB // (ROWS * WINDOW * QWEN3.bytes_per_token_per_layer) + 1
"""Of 8 MiB: more than 5 GiB."""
on_cuda = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])


def random(*shape, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).bfloat16().to(device)


def attention_behind_zeros(query, key, value, num_zeros):
    """By definition: attention to (rows, heads, tokens, dim) behind so many tokens of zeros."""
    start = torch.zeros(1, dtype=torch.int64)
    seen = reference.partial_attention(
        query.cpu().float(),
        key.cpu().float()[None],
        value.cpu().float()[None],
        start,
        SCALE,
        query_start=key.shape[2] - 1,
    )
    nothing = torch.zeros_like(seen[0]), torch.full_like(seen[1], math.log(num_zeros))
    return merge_partials([seen, nothing])[0]


def assert_close(got, expected):
    error = (got.cpu().float() - expected).norm() / expected.norm()
    assert error < 0.02


def zeros(device):
    """The elements of all segments. In host memory they take none but what is written."""
    stack = SegmentStack(RegionPool(), QWEN3, WINDOW)
    stack.reserved_segments = SEGMENTS
    stack.push(SEGMENTS, ROWS)
    (elements,) = stack.runs()
    return elements if device == "cpu" else torch.zeros_like(elements, device=device)


@devices
def test_a_view_of_more_than_2_to_the_31_elements_is_attended_to_its_end(device):
    elements = zeros(device)
    key_view, value_view = split_elements(elements, QWEN3, WINDOW)
    positions = WINDOW * torch.arange(SEGMENTS)
    assert elements.numel() > 2**31
    key, value = random(2, ROWS, 4, WINDOW, 128, device=device)
    key_view[-1], value_view[-1] = 2 * key, value
    query = random(ROWS, 32, 1, 128, device=device)
    out, _ = partial_attention_for(torch.device(device))(
        query, key_view, value_view, positions, SCALE, query_start=WINDOW * SEGMENTS - 1
    )
    num_zeros = WINDOW * (SEGMENTS - 1)
    assert_close(out, attention_behind_zeros(query, 2 * key, value, num_zeros))


@devices
def test_a_mapping_of_5_gib_and_a_byte_is_registered_in_pieces_to_its_end(device):
    accelerator = open_accelerator(device)
    mapping = Mapping(5 * GIB + 1, (GIB, device))
    for end in (*range(GIB, 6 * GIB, GIB), 5 * GIB + 1):
        mapping.register(accelerator, end)
    whole = 5 * GIB + PAGE_BYTES
    assert mapping.registration_ends == [*range(GIB, 6 * GIB, GIB), whole]
    assert mapping.registered_bytes == mapping.num_bytes == whole
    mapping.unmap()
    if isinstance(accelerator, SimulatedAccelerator):
        assert not accelerator.registered


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_a_pinned_region_of_more_than_5_gib_is_read_to_its_end(device):
    """By copies, and in place by a decode step."""
    spec = PartitionSpec(geometry=QWEN3, batch_size=ROWS, max_tokens=None)
    cache = build(spec, 0, device=device)
    num_zeros = WINDOW * SEGMENTS
    cache.reserve(num_zeros + 3 * WINDOW, num_zeros + 2 * WINDOW)
    zero = torch.zeros(ROWS, 4, 1, 128, dtype=torch.bfloat16, device=device)
    key, value = random(2, ROWS, 4, 2 * WINDOW + 9, 128, device=device)
    for count in (*[64 * WINDOW] * (SEGMENTS // 64), SEGMENTS % 64 * WINDOW):
        piece = zero.expand(-1, -1, count, -1)
        cache.append(0, piece, piece)
        cache.flush(0)
    cache.append(0, 2 * key[:, :, :-1], value[:, :, :-1])
    cache.flush(0)
    (lease,) = cache._layers[0].pinned.leases
    assert lease.mapping.registered_bytes > 5 * GIB
    views = cache.views(0)
    assert max(part.key.nbytes for part in views.pinned) <= GIB
    for first, segment in ((0, -2), (WINDOW, -1)):
        copied = views.pinned[-1].key[segment].to(device, non_blocking=True)
        assert torch.equal(copied, 2 * key[:, :, first : first + WINDOW])
    cache.append(0, 2 * key[:, :, -1:], value[:, :, -1:])
    query = random(ROWS, 32, 1, 128, device=device)
    out = attend(cache, 0, query, SCALE)
    assert_close(out, attention_behind_zeros(query, 2 * key, value, num_zeros))
