"""Nothing is lost: bad input is refused; what fails anywhere leaves all as it was before."""

import copy

import pytest
import torch
from harness import (
    Twin,
    build,
    build_faulty,
    geometry,
    interrupt,
    new_tokens,
    read,
    regions,
    same_bits,
    spec,
)
from simulated_streams import LateStream

from sparsekv.device import SimulatedStream
from sparsekv.errors import CacheStateError, CapacityError, LayoutError

LATENTS = geometry(num_kv_heads=1, head_dim=9, head_dim_v=8, shared_kv=True)


# Refusals


def bad_tokens(cache):
    key, value = new_tokens(cache, 3)
    meta = key.to("meta")
    return {
        "batch": (key[:1], value[:1]),
        "empty batch": (key[:0], value[:0]),
        "heads": (key[:, :1], value[:, :1]),
        "head_dim": (key[..., :3], value),
        "head_dim_v": (key, value[..., :3]),
        "three dimensions": (key[0], value[0]),
        "tokens differ": (key, value[:, :, :2]),
        "dtype": (key.double(), value.double()),
        "mixed dtypes": (key, value.half()),
        "device": (meta, value.to("meta")),
        "mixed devices": (key, value.to("meta")),
        "no value": (key, None),
    }


@pytest.mark.parametrize("kind", bad_tokens(build()))
def test_bad_tokens_are_refused_and_change_nothing(kind):
    twin = Twin(build())
    twin.append(7)
    key, value = bad_tokens(twin.cache)[kind]
    with pytest.raises(LayoutError, match=r"; "):
        twin.cache.append(0, key, value)
    twin.check()
    twin.append(7)
    twin.check()


def test_values_are_refused_where_they_are_part_of_keys():
    twin = Twin(build(spec(LATENTS)))
    key, _ = new_tokens(twin.cache, 2)
    with pytest.raises(LayoutError, match="pass no value"):
        twin.cache.append(0, key, key[..., :8])
    twin.check()


@pytest.mark.parametrize("layer_idx", [-1, 2, 99])
def test_layers_that_do_not_exist_are_refused(layer_idx):
    cache = build()
    for use in (
        cache.views,
        cache.flush,
        cache.layer_num_tokens,
        lambda i: cache.append(i, *new_tokens(cache, 1)),
        lambda i: cache.region_of(i, 0),
    ):
        with pytest.raises(LayoutError, match=r"layer_idx=.*layers 0 to 1"):
            use(layer_idx)


@pytest.mark.parametrize("token_idx", [-1, 9])
def test_tokens_that_do_not_exist_are_nowhere(token_idx):
    twin = Twin(build())
    twin.append(9)
    with pytest.raises(LayoutError, match=r"token_idx=.*holds tokens 0 to 8"):
        twin.cache.region_of(0, token_idx)


@pytest.mark.parametrize("flush", [True, False])
def test_tokens_over_max_tokens_are_refused_and_the_rest_still_fits(flush):
    twin = Twin(build(spec(max_tokens=10)))
    twin.append(9, flush=flush)
    with pytest.raises(CapacityError, match="11 tokens: over max_tokens=10; raise"):
        twin.append(2)
    twin.check()
    with pytest.raises(CapacityError, match="11 tokens: over max_tokens=10; raise"):
        twin.cache.reserve(11)
    twin.cache.reserve(10)
    twin.append(1)
    twin.check()


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [0, 2],
        [-1, 0],
        [0.0, 1.0],
        [[0, 1]],
        [True, False, False],
        [False, False],
        [float("nan"), 0.0],
    ],
)
def test_bad_rows_are_refused_and_change_nothing(rows):
    twin = Twin(build())
    twin.append(9)
    for use in (twin.cache.reorder, twin.cache.batch_select_indices):
        with pytest.raises(LayoutError):
            use(torch.tensor(rows))
    twin.check()


def test_reorder_keeps_the_number_of_rows():
    twin = Twin(build())
    twin.append(9)
    for rows in ([0], [0, 1, 1]):
        with pytest.raises(LayoutError, match="batch_select_indices"):
            twin.cache.reorder(torch.tensor(rows))
    twin.check()


@pytest.mark.parametrize("repeats", [0, -1, 1.5, "2", None])
def test_repeats_are_whole_numbers(repeats):
    with pytest.raises(LayoutError, match="repeats="):
        build().batch_repeat_interleave(repeats)


def test_rows_are_chosen_by_booleans_too():
    twin = Twin(build(spec(batch_size=3)))
    twin.append(9)
    twin.cache.batch_select_indices(torch.tensor([True, False, True]))
    twin.apply(lambda tensor: tensor[[0, 2]])
    twin.check()


def test_rows_do_not_change_in_the_middle_of_a_step(tmp_path):
    twin = Twin(build())
    twin.append(6)
    twin.append(5, layers=[0])
    for use in (
        lambda: twin.cache.reorder(torch.tensor([1, 0])),
        lambda: twin.cache.batch_select_indices(torch.tensor([1])),
        lambda: twin.cache.batch_repeat_interleave(2),
        lambda: twin.cache.save(tmp_path / "saved"),
    ):
        with pytest.raises(CacheStateError, match=r"6 to 11 tokens.*crop\(6\)"):
            use()
        twin.check()
    assert list(tmp_path.iterdir()) == []


# Errors lose nothing

OPERATIONS = {
    "append": lambda twin: twin.append(18, flush=False),
    "append and flush": lambda twin: twin.append(18),
    "append one": lambda twin: twin.append(1),
    "crop into a segment": lambda twin: _crop(twin, 6),
    "crop the window": lambda twin: _crop(twin, 9),
    "reorder": lambda twin: _select(twin, [1, 0]),
    "select": lambda twin: _select(twin, [1, 1, 0]),
    "reset": lambda twin: _reset(twin),
}


def _crop(twin, num_tokens):
    twin.cache.crop(num_tokens)
    twin.apply(lambda tensor: tensor[:, :, :num_tokens])


def _select(twin, rows):
    twin.cache.batch_select_indices(torch.tensor(rows))
    twin.apply(lambda tensor: tensor[rows])


def _reset(twin):
    twin.cache.reset()
    twin.apply(lambda tensor: tensor[:, :, :0])


class Disk(Exception):
    pass


@pytest.mark.parametrize("pending", [False, True], ids=["flushed", "pending"])
@pytest.mark.parametrize(
    ("error", "stream_type"),
    [
        (Disk("lost"), SimulatedStream),
        (KeyboardInterrupt(), SimulatedStream),
        (CapacityError("full"), LateStream),
    ],
    ids=["lost", "Ctrl-C", "full, late"],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_fails_at_any_copy_changes_nothing(stream_type, name, error, pending):
    """Each allocation, copy and registration fails in turn; then the operation is done again."""
    for countdown in range(1, 120):
        cache = build_faulty(spec(window_size=4), 0.5, stream_type)
        twin = Twin(cache)
        twin.append(11)
        if pending:
            twin.append(10, flush=False)
        cache.accelerator.fail(countdown, error)
        if name.startswith("append"):
            failed = _append_failing(twin, name, type(error))
        else:
            try:
                OPERATIONS[name](twin)
                failed = False
            except type(error):
                failed = True
        cache.accelerator.countdown = None
        twin.check()
        if failed and not name.startswith("append"):
            OPERATIONS[name](twin)
        twin.check()
        # A refused registration is no error: segments go to the other region.
        if not name.startswith("reset") and not cache.registrar.is_refused:
            _assert_share(cache)
        got_through = cache.accelerator.num_operations < countdown
        twin.append(9)
        twin.check()
        if got_through:
            break
    else:
        raise AssertionError("never got through")
    assert countdown > 1 or name in ("append", "append one", "crop the window")


def _append_failing(twin, name, kind):
    """Append to each layer; a failed append or flush is done again. Whether one failed."""
    cache, failed = twin.cache, False
    for layer_idx in range(2):
        key, value = new_tokens(cache, 1 if name == "append one" else 18)
        try:
            cache.append(layer_idx, key, value)
        except kind:
            failed = True
            twin.check()
            cache.append(layer_idx, key, value)
        twin.note(layer_idx, key, value)
        twin.check()
        if name != "append":
            try:
                cache.flush(layer_idx)
            except kind:
                failed = True
                twin.check()
                cache.flush(layer_idx)
    return failed


def _assert_share(cache):
    placed = [region for region in regions(cache)[::4] if region != "window"]
    assert abs(placed.count("unpinned") - len(placed) / 2) <= 0.5


def _state(cache):
    return [read(cache, layer_idx) for layer_idx in range(cache.spec.geometry.num_layers)]


def _equal(left, right):
    return all(same_bits(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", ["flush", "crop", "crop window", "select", "reset", "append"])
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_line_leaves_each_layer_before_or_after(name, stride):
    """KeyboardInterrupt before each `stride`-th line that the package runs, copies or not."""
    operations = {
        "flush": lambda cache: [cache.flush(i) for i in range(2)],
        "crop": lambda cache: cache.crop(6),
        "crop window": lambda cache: cache.crop(20),
        "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 0])),
        "reset": lambda cache: cache.reset(),
        "append": None,
    }
    start = build(spec(geometry(num_kv_heads=1, head_dim=2)))
    twin = Twin(start)
    twin.append(7)
    twin.append(14, flush=False)
    new = [new_tokens(start, 10) for _ in range(2)]

    def append(cache):
        for layer_idx in range(2):
            if cache.layer_num_tokens(layer_idx) == 21:
                cache.append(layer_idx, *new[layer_idx])

    operation = operations[name] or append
    before, done = _state(start), copy.deepcopy(start)
    operation(done)
    after = _state(done)
    at_line = 1
    while True:
        cache = copy.deepcopy(start)
        struck = interrupt(at_line, lambda cache=cache: operation(cache))
        for found, old, new_state in zip(_state(cache), before, after, strict=True):
            assert _equal(found, old) or _equal(found, new_state), f"line {at_line}"
        if name in ("select", "reset"):
            whole = all(map(_equal, _state(cache), before)) or all(
                map(_equal, _state(cache), after)
            )
            assert whole, f"line {at_line}: some layers only"
        if cache.batch_size == start.batch_size or name != "select":
            operation(cache)
        assert all(map(_equal, _state(cache), after)), f"again after line {at_line}"
        if name != "append":
            twin_after = Twin(cache)
            twin_after.dense = [list(layer) for layer in after]
            twin_after.append(9)
            twin_after.check()
        if not struck:
            break
        at_line += stride
    assert at_line > 10
