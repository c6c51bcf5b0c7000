"""One step of one layer against the definition of attention on the whole sequence; its settings."""

import pytest
import torch
from harness import Twin, build, geometry, interrupt, regions, seconds_to_synchronize, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.engine import CacheConfig, attend
from sparsekv.errors import LayoutError
from sparsekv.format import KVGeometry
from sparsekv.kernels import reference
from sparsekv.roofline import PRESETS
from sparsekv.transfer import stream

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-5, torch.float16: 2e-5}


def whole(twin, layer_idx, query, scale, **masks):
    """Attention to the dense keys and values, in one piece."""
    key, value = (tensor.to(query.device)[None] for tensor in twin.dense[layer_idx])
    start = key.shape[3] - query.shape[2]
    positions = torch.zeros(1, dtype=torch.int64)
    return reference.partial_attention(
        query, key, value, positions, scale, query_start=start, **masks
    )[0]


def plain(twin, layer_idx, query, scale):
    """The same by plain torch, in the dtype of the keys."""
    group_size = query.shape[1] // twin.dense[layer_idx][0].shape[1]
    key, value = (
        tensor.to(query.device).repeat_interleave(group_size, 1) for tensor in twin.dense[layer_idx]
    )
    num_queries, num_tokens = query.shape[2], key.shape[2]
    seen = torch.ones(num_queries, num_tokens, dtype=torch.bool, device=query.device)
    scores = scale * (query @ key.transpose(-1, -2))
    scores = scores.masked_fill(~seen.tril(num_tokens - num_queries), -torch.inf)
    return (torch.softmax(scores, -1) @ value).float()


def assert_attends(twin, num_queries, group_size=2, **masks):
    cache = twin.cache
    kv = cache.spec.geometry
    for layer_idx in range(kv.num_layers):
        shape = (cache.batch_size, kv.num_kv_heads * group_size, num_queries, kv.head_dim)
        query = torch.randn(shape, device=cache.device).to(kv.dtype)
        found = attend(cache, layer_idx, query, 0.3, **masks)
        expected = whole(twin, layer_idx, query, 0.3, **masks)
        assert found.dtype == expected.dtype
        tolerance = TOLERANCE[kv.dtype]
        is_rounded = kv.dtype == torch.bfloat16 or (kv.dtype == torch.float16 and query.is_cuda)
        if is_rounded and num_queries * group_size >= 5:
            # Matrix units round the weights of so many rows, as plain torch does.
            usual = plain(twin, layer_idx, query, 0.3)
            tolerance = max(tolerance, 2 * (usual - expected).abs().max().item())
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-5)


def assert_redone_after_ctrl_c(twin, query, stride):
    """A step of the first of two layers that Ctrl-C ends at any line can be done again."""
    expected = [whole(twin, layer_idx, query, 0.3) for layer_idx in range(2)]
    at_line, kept = 1, []
    while interrupt(at_line, lambda: attend(twin.cache, 0, query, 0.3), kept):
        assert seconds_to_synchronize() < 1.0
        for layer_idx in (1, 0):
            found = attend(twin.cache, layer_idx, query, 0.3)
            torch.testing.assert_close(found, expected[layer_idx], atol=1e-5, rtol=1e-5)
        at_line += stride
    assert at_line > 50
    twin.check()


@pytest.mark.parametrize("share", [0, 0.3, 0.5, 1])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [4, 7])
def test_a_step_equals_attention_to_the_whole(share, dtype, width):
    twin = Twin(build(spec(geometry(dtype=dtype, head_dim_v=width)), share))
    for length in (30, 1, 1, 9, 4):
        twin.append(length, flush=False)
        assert_attends(twin, num_queries=length)
        assert regions(twin.cache).count("window") == twin.cache.num_tokens % 4, "not flushed"
    twin.check()


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    share=st.sampled_from([0, 0.3, 1]),
    ping_pong=st.integers(1, 4),
    rows=st.lists(st.integers(0, 1), min_size=1, max_size=4),
    group_size=st.sampled_from([1, 3]),
)
def test_steps_after_beams_read_through_row_tables(lengths, share, ping_pong, rows, group_size):
    twin = Twin(build(spec(ping_pong_tokens=4 * ping_pong), share))
    for length in lengths:
        twin.append(length, flush=False)
        assert_attends(twin, length, group_size)
        rows = [row % twin.cache.batch_size for row in rows]
        twin.cache.batch_select_indices(torch.tensor(rows))
        twin.apply(lambda tensor, rows=rows: tensor[rows])


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_masked_keys_are_not_attended(share):
    latent = geometry(num_kv_heads=1, head_dim=9, head_dim_v=8, shared_kv=True)
    for kv in (geometry(), latent):
        twin = Twin(build(spec(kv), share))
        twin.append(19)
        twin.append(3, flush=False)
        key_mask = torch.ones(2, 22, dtype=torch.bool)
        key_mask[0, :7] = False
        key_mask[1, 12] = False
        assert_attends(twin, 3, key_mask=key_mask)
        twin.append(2, flush=False)
        mask = torch.rand(2, 1, 2, 24) < 0.5
        assert_attends(twin, 2, mask=mask)
        twin.append(2, flush=False)
        assert_attends(twin, 2, mask=torch.randn(1, 1, 2, 26))


def test_a_query_that_does_not_fit_is_refused_and_nothing_is_lost():
    twin = Twin(build())
    twin.append(9)
    with pytest.raises(LayoutError):
        attend(twin.cache, 0, torch.randn(1, 4, 1, 4), 0.3)
    with pytest.raises(LayoutError):
        attend(twin.cache, 0, torch.randn(2, 4, 10, 4), 0.3)
    twin.check()


@pytest.mark.parametrize("ping_pong", [1, 2, 3])
def test_evict_then_stream_is_identity(ping_pong):
    """Chunk by chunk through two buffers, each whole until the second one after it."""
    twin = Twin(build(spec(ping_pong_tokens=4 * ping_pong), share=0))
    twin.append(37)
    twin.cache.batch_select_indices(torch.tensor([1, 0, 1]))
    twin.apply(lambda tensor: tensor[[1, 0, 1]])
    twin.append(30)
    cache, seen, last = twin.cache, [], None
    key, value = twin.dense[1]
    for part in stream(cache.ping_pong, cache.views(1).pinned):
        assert part.key.shape[0] <= ping_pong
        if last is not None and last.key.shape[1] == part.key.shape[1]:
            assert last.key.data_ptr() != part.key.data_ptr()
        for i, start in enumerate(part.positions.tolist()):
            rows = torch.arange(3) if part.row_table is None else part.row_table[i]
            assert torch.equal(part.key[i][rows], key[:, :, start : start + 4])
            assert torch.equal(part.value[i][rows], value[:, :, start : start + 4])
            seen.append(start)
        last = part
    assert sorted(seen) == list(range(0, 67 // 4 * 4, 4))
    streamed = 16 * 4 * cache.spec.geometry.bytes_per_token_per_layer
    assert cache.accelerator.h2d_bytes == streamed // 16 * (9 * 2 + 7 * 3)
    assert cache.ping_pong.num_bytes == 2 * ping_pong * 4 * 3 * streamed // 64


# Settings


@pytest.mark.parametrize(
    ("geometry_", "batch_size", "window_size", "expected"),
    [
        (KVGeometry(num_layers=48, num_kv_heads=4, head_dim=128), 32, 256, 512),
        (KVGeometry(num_layers=48, num_kv_heads=4, head_dim=128), 8, 256, 512),
        (KVGeometry(num_layers=48, num_kv_heads=4, head_dim=128), 4, 256, 1024),
        (KVGeometry(num_layers=48, num_kv_heads=4, head_dim=128), 1, 256, 4096),
        (KVGeometry(num_layers=32, num_kv_heads=8, head_dim=128), 1, 256, 2048),
        (KVGeometry(num_layers=30, num_kv_heads=3, head_dim=64), 1, 256, 11008),
        (KVGeometry(num_layers=48, num_kv_heads=4, head_dim=128), 64, 192, 576),
        (KVGeometry(num_layers=48, num_kv_heads=4, head_dim=128), 64, 1024, 1024),
    ],
)
def test_ping_pong_is_the_fewest_whole_windows_of_512_tokens_and_8_mib(
    geometry_, batch_size, window_size, expected
):
    spec_ = CacheConfig(window_size=window_size).spec(geometry_, batch_size)
    assert spec_.ping_pong_tokens == expected
    half = expected * batch_size * geometry_.bytes_per_token_per_layer
    fewer = expected - window_size
    assert expected % window_size == 0
    assert expected >= 512
    assert half >= 8 << 20
    assert fewer < 512 or fewer * half // expected < 8 << 20


def test_settings_reach_the_cut():
    config = CacheConfig(
        cpu_share=0.25, window_size=128, block_size=32, ping_pong_tokens=384, max_tokens=999
    )
    spec_ = config.spec(geometry(), 3)
    assert (spec_.batch_size, spec_.max_tokens, spec_.block_size) == (3, 999, 32)
    assert (spec_.window_size, spec_.ping_pong_tokens) == (128, 384)
    assert config.router().marginal_share == 0.25
    assert config.router() is not config.router()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu_share": 1.5}, "cpu_share=1.5"),
        ({"cpu_share": float("nan")}, "cpu_share=nan"),
        ({"cpu_share": "automatic"}, "cpu_share='automatic'"),
        ({"cpu_share": "0.5"}, "cpu_share='0.5'"),
        ({"cpu_share": None}, "cpu_share=None"),
        ({"cpu_share": 0.5, "profile": PRESETS["h200"]}, "profile beside cpu_share=0.5: .*auto"),
        ({"cpu_share": 0, "profile": PRESETS["h200"]}, "profile beside cpu_share=0: .*auto"),
        ({"profile": "h200"}, "profile of type str: .*PRESETS"),
        ({"profile": PRESETS}, "profile of type mappingproxy"),
        ({"profile": PRESETS["h200"].to_json()}, "profile of type dict"),
        ({"profile": 0.5, "cpu_share": 0.5}, "profile of type float"),
        ({"profile": False}, "profile of type bool"),
        ({"window_size": 100}, "window_size=100: .*block_size=64"),
        ({"window_size": 0}, "window_size=0"),
        ({"window_size": -64}, "window_size=-64"),
        ({"window_size": 256.0}, "window_size=256.0"),
        ({"window_size": "256"}, "window_size='256'"),
        ({"window_size": None}, "window_size=None"),
        ({"block_size": True}, "block_size=True"),
        ({"ping_pong_tokens": 300}, "ping_pong_tokens=300"),
        ({"ping_pong_tokens": 0}, "ping_pong_tokens=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 1e6}, "max_tokens=1000000.0"),
    ],
)
def test_bad_settings_are_refused_at_once(change, message):
    with pytest.raises(LayoutError, match=message):
        CacheConfig(**change)


def test_settings_are_frozen_and_unknown_ones_refused():
    with pytest.raises(AttributeError):
        CacheConfig().window_size = 512
    with pytest.raises(TypeError):
        CacheConfig(selector="quest")
