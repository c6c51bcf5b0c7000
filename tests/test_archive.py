"""Saved caches: bitwise round trips, and refusal of every other file, with the cache as it was."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from harness import Twin, build, geometry, regions, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from strategies import appends, row_choices, shares, specs

import sparsekv.archive as archive
from sparsekv.errors import CapacityError, FormatError


def filled(spec_=None, share=0.5, num_tokens=23, rows=(1, 0)):
    twin = Twin(build(spec_, share))
    twin.append(num_tokens // 2)
    rows = list(rows)
    twin.cache.batch_select_indices(torch.tensor(rows))
    twin.apply(lambda tensor: tensor[rows])
    twin.append(num_tokens - num_tokens // 2)
    return twin


@pytest.fixture
def saved(tmp_path):
    """A twin and the file it was saved to."""
    twin = filled()
    twin.cache.save(tmp_path / "saved")
    return twin, tmp_path / "saved"


def assert_refused(path, error=FormatError, match=None, spec_=None):
    """Loading raises, names the file and a remedy, and leaves the cache as it was."""
    twin = filled(spec_, num_tokens=14, rows=(1, 1))
    before = regions(twin.cache), twin.cache.router.error
    with pytest.raises(error, match=match) as caught:
        twin.cache.load(path)
    assert str(path) in str(caught.value)
    assert ";" in str(caught.value), "no remedy"
    assert (regions(twin.cache), twin.cache.router.error) == before
    twin.check()
    twin.append(5)
    twin.check()


# Round trips


@settings(max_examples=25)
@given(spec_=specs(), share=shares(), lengths=appends(max_size=3), data=st.data())
def test_a_loaded_cache_is_the_saved_one(tmp_path_factory, spec_, share, lengths, data):
    path = tmp_path_factory.mktemp("round") / "saved"
    twin = Twin(build(spec_, share))
    for length in lengths:
        rows = data.draw(row_choices(twin.cache.batch_size, 4))
        twin.cache.batch_select_indices(torch.tensor(rows))
        twin.apply(lambda tensor, rows=rows: tensor[rows])
        twin.append(length, flush=data.draw(st.booleans()))
    twin.cache.save(path)
    twin.check()
    other = Twin(build(spec_, share))
    other.append(5)
    other.cache.load(path)
    other.dense = [list(layer) for layer in twin.dense]
    other.check()
    assert regions(other.cache) == regions(twin.cache)
    assert other.cache.router.error == twin.cache.router.error
    tables = [cache._placement.all_row_tables() for cache in (twin.cache, other.cache)]
    assert torch.equal(*tables)
    for each in (twin, other):
        each.append(13)
        each.check()
    assert regions(other.cache) == regions(twin.cache), "the router went on differently"
    for each in (twin, other):
        each.cache.crop(2)
        each.apply(lambda tensor: tensor[:, :, :2])
        each.check()
        each.append(7)
    assert regions(other.cache) == regions(twin.cache)


@pytest.mark.parametrize(
    "kv",
    [
        geometry(dtype=torch.bfloat16),
        geometry(dtype=torch.float16, head_dim_v=3),
        geometry(dtype=torch.float64),
        geometry(num_kv_heads=1, head_dim=9, head_dim_v=8, shared_kv=True),
    ],
    ids=["bf16", "fp16", "fp64", "latents"],
)
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 23])
def test_every_dtype_and_length_makes_the_round_trip(tmp_path, kv, num_tokens):
    twin = filled(spec(kv), num_tokens=num_tokens)
    twin.cache.save(str(tmp_path / "saved"))
    other = Twin(build(spec(kv, batch_size=3)))
    other.cache.load(str(tmp_path / "saved"))
    assert other.cache.batch_size == 2
    other.dense = twin.dense
    other.check()
    other.append(9)
    other.check()


def test_the_original_file_survives_a_load_and_a_longer_life(saved):
    twin, path = saved
    content = path.read_bytes()
    twin.cache.load(path)
    twin.append(20)
    twin.cache.crop(1)
    assert path.read_bytes() == content


def test_saving_again_replaces_the_file(saved):
    twin, path = saved
    twin.append(11)
    twin.cache.save(path)
    other = Twin(build())
    other.cache.load(path)
    other.dense = twin.dense
    other.check()
    assert [entry.name for entry in path.parent.iterdir()] == ["saved"]


def test_saving_takes_no_second_copy_of_the_regions(monkeypatch, tmp_path):
    """Where slots need no padding, what is written are the regions themselves."""
    twin = Twin(build(spec(geometry(head_dim=16))))
    twin.append(43)
    given_tensors = {}
    real = archive.save_file
    monkeypatch.setattr(
        archive, "save_file", lambda t, *rest: given_tensors.update(t) or real(t, *rest)
    )
    twin.cache.save(tmp_path / "saved")
    own = {
        run.data_ptr()
        for layer in twin.cache._layers
        for stack in layer.stacks.values()
        for run in stack.runs()
    }
    pieces = {name: t for name, t in given_tensors.items() if "pinned" in name}
    assert pieces
    assert {tensor.data_ptr() for tensor in pieces.values()} == own


# Other files


@pytest.mark.parametrize("part", [i / 40 for i in range(40)])
def test_truncated_files_are_refused(saved, part):
    _, path = saved
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    assert_refused(path, match="save the cache again|not a saved cache")


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 64])
def test_files_that_lack_their_last_or_first_bytes_are_refused(saved, num_bytes):
    _, path = saved
    content = path.read_bytes()
    path.write_bytes(content[:-num_bytes])
    assert_refused(path)
    path.write_bytes(content[num_bytes:])
    assert_refused(path)
    path.write_bytes(content + b"\0" * num_bytes)
    assert_refused(path)


@settings(max_examples=30)
@given(content=st.binary(max_size=300), claim=st.booleans())
def test_random_bytes_are_refused(tmp_path_factory, content, claim):
    path = tmp_path_factory.mktemp("random") / "saved"
    path.write_bytes((struct.pack("<Q", max(len(content) - 8, 2)) if claim else b"") + content)
    assert_refused(path)


def test_missing_files_folders_and_forbidden_files_are_refused(tmp_path):
    assert_refused(tmp_path / "none", match="no such file; save")
    assert_refused(tmp_path)
    assert_refused(tmp_path / "none" / "none")
    (tmp_path / "empty").touch()
    assert_refused(tmp_path / "empty")


def test_foreign_safetensors_are_refused(tmp_path):
    save_file({"weight": torch.zeros(3)}, tmp_path / "model")
    assert_refused(tmp_path / "model", match="not a saved cache")
    save_file({"weight": torch.zeros(3)}, tmp_path / "model", {"format": "pt"})
    assert_refused(tmp_path / "model", match="not a saved cache")


def rewrite(path, header=None, metadata=None, tensors=None, drop=()):
    """Save the file anew with changes; `header` and `tensors` may be functions of the old ones."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        old = file.metadata()
    content = {name: t for name, t in load_file(path).items() if name not in drop}
    content.update(tensors(content) if callable(tensors) else tensors or {})
    if header is not None:
        fields = json.loads(old["header"])
        fields = header(fields) if callable(header) else {**fields, **header}
        old["header"] = fields if isinstance(fields, str) else json.dumps(fields)
    old.update(metadata or {})
    save_file(content, path, {k: v for k, v in old.items() if v is not None})


def test_an_unchanged_rewrite_is_accepted(saved):
    twin, path = saved
    rewrite(path, header=lambda fields: fields)
    other = Twin(build())
    other.cache.load(path)
    other.dense = twin.dense
    other.check()


@pytest.mark.parametrize("version", ["2", "999999", "0", "-1", "1.5", "one", "", None])
def test_other_versions_are_refused(saved, version):
    rewrite(saved[1], metadata={"version": version})
    assert_refused(saved[1], match="version.*upgrade sparsekv")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"x"', None])
def test_headers_that_are_none_are_refused(saved, text):
    rewrite(saved[1], metadata={"header": text})
    assert_refused(saved[1], match="header (cannot be read|lacks)")


HEADER_KEYS = (
    "geometry",
    "window_size",
    "segment_size",
    "batch_size",
    "num_tokens",
    "regions",
    "segment_rows",
    "router_errors",
    "router_error",
)


@pytest.mark.parametrize("key", HEADER_KEYS)
def test_headers_that_lack_a_field_are_refused(saved, key):
    rewrite(saved[1], header=lambda f: {k: v for k, v in f.items() if k != key})
    assert_refused(saved[1], match=f"lacks {key}")


@pytest.mark.parametrize("value", [None, "x", -1, 1.5, True, [], [1], {}, 10**30, float("nan")])
@pytest.mark.parametrize("key", HEADER_KEYS)
def test_headers_of_other_types_are_refused(saved, key, value):
    if key == "router_error" and value in (-1, True):
        pytest.skip("a number in [-1, 1]")
    rewrite(saved[1], header={key: value})
    assert_refused(saved[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda f: {"num_tokens": f["num_tokens"] + 4},
        lambda f: {"num_tokens": f["num_tokens"] - 4},
        lambda f: {"batch_size": f["batch_size"] + 1},
        lambda f: {"segment_size": 0},
        lambda f: {"window_size": f["window_size"] + 1},
        lambda f: {"regions": f["regions"][:-1]},
        lambda f: {"regions": [*f["regions"][:-1], "window"]},
        lambda f: {"regions": ["pinned"] * len(f["regions"])},
        lambda f: {"segment_rows": [3] * len(f["segment_rows"])},
        lambda f: {"segment_rows": [0] * len(f["segment_rows"])},
        lambda f: {"segment_rows": ["2"] * len(f["segment_rows"])},
        lambda f: {"router_errors": [None] * len(f["router_errors"])},
        lambda f: {"router_errors": [7.0] * len(f["router_errors"])},
        lambda f: {
            **{k: f[k][:-1] for k in ("regions", "segment_rows", "router_errors")},
            "num_tokens": f["num_tokens"] - 4,
        },
        lambda f: {
            **{k: f[k] + f[k][-1:] for k in ("regions", "segment_rows", "router_errors")},
            "num_tokens": f["num_tokens"] + 4,
        },
    ],
)
def test_headers_that_contradict_themselves_or_the_tensors_are_refused(saved, change):
    rewrite(saved[1], header=lambda fields: {**fields, **change(fields)})
    assert_refused(saved[1], match="save the cache again")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"dtype": "nonsense"},
        {"dtype": "nn"},
        {"dtype": None},
        {"num_layers": 0},
        {"num_layers": 3},
        {"head_dim": 8},
        {"shared_kv": True},
        {"more": 1},
    ],
)
def test_other_geometries_are_refused(saved, change):
    rewrite(saved[1], header=lambda f: {**f, "geometry": {**f["geometry"], **change}})
    assert_refused(saved[1])


def test_geometries_without_a_dtype_are_refused(saved):
    rewrite(saved[1], header=lambda f: {**f, "geometry": {"num_layers": 2}})
    assert_refused(saved[1])


@pytest.mark.parametrize(
    "spec_",
    [
        spec(window_size=2, batch_size=2),
        spec(geometry(num_layers=1)),
        spec(geometry(num_kv_heads=1)),
        spec(geometry(head_dim=2)),
        spec(geometry(head_dim_v=2)),
        spec(geometry(dtype=torch.bfloat16)),
    ],
)
def test_a_cache_of_another_cut_refuses(saved, spec_):
    assert_refused(saved[1], match="saved with (geometry|window_size)=.*built alike", spec_=spec_)


def test_more_tokens_than_max_tokens_are_refused(saved):
    assert_refused(
        saved[1], CapacityError, "23 tokens, over max_tokens=22; raise", spec(max_tokens=22)
    )


NAMES = (
    "row_tables",
    "layers.0.window",
    "layers.1.window",
    "layers.1.unpinned.0",
    "layers.0.pinned.0",
)


@pytest.mark.parametrize("name", NAMES)
def test_missing_tensors_are_refused(saved, name):
    assert name in load_file(saved[1])
    rewrite(saved[1], drop=(name,))
    assert_refused(saved[1], match="lacks")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:0],
        lambda t: t[..., :-1].contiguous(),
        lambda t: t[None].contiguous(),
        lambda t: t.to(torch.float16),
        lambda t: torch.zeros(()),
        lambda t: t.flatten(),
    ],
    ids=["empty", "narrow", "more dims", "dtype", "scalar", "flat"],
)
@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_other_shapes_or_dtypes_are_refused(saved, name, change):
    rewrite(saved[1], tensors=lambda old: {name: change(old[name])})
    assert_refused(saved[1])


@pytest.mark.parametrize("row", [-1, 2, 99])
def test_row_tables_that_point_nowhere_are_refused(saved, row):
    rewrite(saved[1], tensors=lambda old: {"row_tables": torch.full_like(old["row_tables"], row)})
    assert_refused(saved[1], match="row_tables")


def test_unknown_pieces_are_refused(saved):
    rewrite(saved[1], tensors={"layers.0.pinned.x": torch.zeros(3)})
    assert_refused(saved[1])


# Failed saves


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", ["before", "half-way", "fsync", "replace"])
def test_a_failed_save_leaves_the_old_file_and_no_other(saved, monkeypatch, error, when):
    twin, path = saved
    content = path.read_bytes()
    twin.append(5)

    def fail(*args):
        if when == "half-way":
            Path(args[1]).write_bytes(content[:100])
        raise error

    target = {"fsync": (os, "fsync"), "replace": (Path, "replace")}.get(
        when, (archive, "save_file")
    )
    with monkeypatch.context() as patch:
        patch.setattr(*target, fail)
        with pytest.raises(type(error)):
            twin.cache.save(path)
    assert path.read_bytes() == content
    assert [entry.name for entry in path.parent.iterdir()] == ["saved"]
    twin.check()
    twin.cache.save(path)
    other = Twin(build())
    other.cache.load(path)
    other.dense = twin.dense
    other.check()


def test_saving_where_nothing_can_be_written_is_an_os_error(tmp_path):
    twin = filled()
    with pytest.raises(OSError, match="none"):
        twin.cache.save(tmp_path / "none" / "saved")
    with pytest.raises(OSError, match="directory"):
        twin.cache.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))
    twin.check()


@pytest.mark.parametrize("stage", ["get_tensor", "push"])
def test_a_load_that_breaks_off_leaves_the_cache_as_it_was(saved, monkeypatch, stage):
    from sparsekv.regions import SegmentStack

    twin, path = saved
    twin.append(6)
    calls, real = [], SegmentStack.push

    def push(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt if stage == "push" else CapacityError("full")
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentStack, "push", push)
        with pytest.raises((KeyboardInterrupt, CapacityError)):
            twin.cache.load(path)
    twin.check()
    twin.append(6)
    twin.check()
