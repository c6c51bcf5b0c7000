"""Hypothesis strategies: geometries, specs, cost models, batches of tokens, row indices and saved
headers.
"""

import torch
from hypothesis import strategies as st

from sparsekv.format import KVGeometry, PartitionSpec
from sparsekv.roofline import CostModel, MachineProfile

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@st.composite
def geometries(draw, max_layers=3, dtypes=DTYPES):
    """Small shapes, odd ones too; V as wide as K, of another width, or part of K."""
    head_dim = draw(st.sampled_from([1, 3, 4, 8]))
    kind = draw(st.sampled_from(["equal", "other", "shared"]))
    head_dim_v = {
        "equal": st.none(),
        "other": st.sampled_from([1, 2, 5, 8]),
        "shared": st.integers(1, head_dim),
    }[kind]
    return KVGeometry(
        num_layers=draw(st.integers(1, max_layers)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=head_dim,
        head_dim_v=draw(head_dim_v),
        dtype=draw(st.sampled_from(dtypes)),
        shared_kv=kind == "shared",
    )


@st.composite
def specs(draw, max_batch=4, geometry=None, max_tokens=None):
    """Windows of 1 to 12 tokens, so that a few appends cross many segments."""
    block_size = draw(st.integers(1, 3))
    window_size = block_size * draw(st.integers(1, 4))
    divisors = [n for n in range(1, window_size + 1) if window_size % n == 0]
    return PartitionSpec(
        geometry=draw(geometries()) if geometry is None else geometry,
        batch_size=draw(st.integers(1, max_batch)),
        max_tokens=max_tokens,
        block_size=block_size,
        window_size=window_size,
        ping_pong_tokens=window_size * draw(st.integers(1, 3)),
        segment_size=draw(st.one_of(st.none(), st.sampled_from(divisors))),
    )


def shares():
    """Shares, both ends and awkward fractions among them."""
    return st.one_of(st.sampled_from([0, 0.0, 0.1, 0.3, 0.5, 0.7, 1, 1.0]), st.floats(0, 1))


@st.composite
def cost_models(draw):
    """Machines of 1 ns to 1 ms per token on either side, with overheads of up to 10 ms."""
    costs = st.floats(-9, -3).map(lambda exponent: 10**exponent)
    overheads = st.one_of(st.just(0.0), st.floats(0, 1e-2))
    return CostModel(
        cpu_s_per_token=draw(costs),
        h2d_s_per_token=draw(costs),
        cpu_overhead_s=draw(overheads),
        gpu_overhead_s=draw(overheads),
    )


rates = st.floats(-2, 4).map(lambda exponent: 10**exponent)
"""From 1e7 to 1e13 bytes/s, or as many operations a byte as no model needs."""


@st.composite
def machines(draw):
    """Machines whose every rate may be a hundredth or ten thousand."""
    counts = st.integers(1, 2**50)
    overheads = st.one_of(st.just(0.0), st.floats(0, 1e-2))
    return MachineProfile(
        name=draw(st.text(min_size=1, max_size=8)),
        cpu_read_gbs=draw(rates),
        cpu_tflops=draw(rates),
        cpu_shared_kv_tflops=draw(st.one_of(st.none(), rates)),
        h2d_gbs=draw(rates),
        d2h_gbs=draw(rates),
        direct_read_gbs=draw(rates),
        gather_gbs=draw(rates),
        hbm_gbs=draw(rates),
        ram_bytes=draw(counts),
        vram_bytes=draw(counts),
        num_threads=draw(counts),
        reads_pinned_at_full_speed=draw(st.booleans()),
        cpu_overhead_s=draw(overheads),
        gpu_overhead_s=draw(overheads),
    )


def appends(max_tokens=40, max_size=6):
    """Lengths of successive appends: nothing, one token, several windows at once."""
    return st.lists(
        st.one_of(st.just(0), st.just(1), st.integers(1, max_tokens)), max_size=max_size
    )


def row_choices(batch_size, max_size=6):
    """Row indices with repetitions and omissions."""
    return st.lists(st.integers(0, batch_size - 1), min_size=1, max_size=max_size)


def stack_operations(max_size=12):
    """("push", segments, rows) and ("truncate", part of the length kept)."""
    push = st.tuples(st.just("push"), st.integers(1, 6), st.integers(1, 5))
    truncate = st.tuples(st.just("truncate"), st.floats(0, 1), st.just(0))
    return st.lists(st.one_of(push, push, truncate), max_size=max_size)
