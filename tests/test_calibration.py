"""Calibration files: what was saved comes back, and whatever else lies there is told of once."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import cost_models, machines, shares

from sparsekv.errors import LayoutError
from sparsekv.kernels.cpu import build
from sparsekv.roofline import (
    PRESETS,
    Calibration,
    CalibrationPoint,
    CostModel,
    ProfileKey,
    profile_folder,
)
from sparsekv.roofline.calibration import VERSION, _hash

KEY = ProfileKey(
    cpu="Intel(R) Xeon(R) Processor",
    gpu="NVIDIA H200",
    driver="580.159.04",
    geometry="32 heads, 4 of 128",
    dtype="bfloat16",
    batch_size=16,
    num_threads=15,
)
CALIBRATION = Calibration(
    key=KEY,
    machine=PRESETS["h200"],
    cost=CostModel(cpu_s_per_token=3e-7, h2d_s_per_token=7.5e-7, gpu_overhead_s=1e-5),
    residual=0.0123,
    points=(CalibrationPoint(num_tokens=8192, share=0.7, cpu_s=1.7e-3, gpu_s=1.9e-3),),
)
NEWER = replace(CALIBRATION, residual=0.5)
OTHERS = {
    "cpu": "AMD EPYC",
    "gpu": "NVIDIA A100",
    "driver": "580.159.05",
    "geometry": "32 heads, 8 of 128",
    "dtype": "float16",
    "batch_size": 17,
    "num_threads": 16,
}

counts = st.integers(1, 2**31)
seconds = st.floats(0, 1e3)


@st.composite
def keys(draw):
    text = st.text(max_size=12)
    names = {name: draw(text) for name in ("cpu", "gpu", "driver", "geometry", "dtype")}
    return ProfileKey(**names, batch_size=draw(counts), num_threads=draw(counts))


points = st.builds(
    CalibrationPoint,
    num_tokens=st.integers(0, 2**40),
    share=shares(),
    cpu_s=seconds,
    gpu_s=seconds,
)


@st.composite
def calibrations(draw):
    return Calibration(
        key=draw(keys()),
        machine=draw(machines()),
        cost=draw(cost_models()),
        residual=draw(st.floats(0, 1e3)),
        points=tuple(draw(st.lists(points, max_size=4))),
        reads_in_place=draw(st.booleans()),
    )


@contextlib.contextmanager
def folders():
    """A folder that does not exist yet, for tests that run many times."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "cache" / "profiles"


@contextlib.contextmanager
def warnings_of_files():
    """What the files are told of while this lasts."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("sparsekv.roofline.calibration")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def load(folder, key=KEY):
    """(what was loaded, what was told)."""
    with warnings_of_files() as told:
        return Calibration.load(folder, key), told


def assert_told_once(folder, path):
    found, told = load(folder)
    assert found is None
    assert len(told) == 1
    assert str(path) in told[0]
    assert "cannot be used" in told[0]
    assert "is left aside" in told[0]
    assert len(told[0]) < len(str(path)) + 500
    return told[0]


@given(calibrations())
def test_what_was_saved_comes_back(calibration):
    with folders() as folder:
        path = calibration.save(folder)
        assert load(folder, calibration.key) == (calibration, [])
        assert os.listdir(folder) == [path.name]


def test_where_nothing_was_saved_there_is_nothing_and_no_warning(tmp_path):
    assert load(tmp_path / "none") == (None, [])
    CALIBRATION.save(tmp_path)
    assert load(tmp_path, replace(KEY, batch_size=4)) == (None, [])


def test_the_latest_stays(tmp_path):
    for calibration in (CALIBRATION, NEWER):
        path = calibration.save(tmp_path)
        assert load(tmp_path) == (calibration, [])
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("field", OTHERS)
def test_each_field_of_the_key_has_files_of_its_own(tmp_path, field):
    other = replace(KEY, **{field: OTHERS[field]})
    assert other.file_name != KEY.file_name
    CALIBRATION.save(tmp_path)
    assert load(tmp_path, other) == (None, [])


@given(keys())
def test_names_of_files_are_short_and_plain(key):
    assert len(key.file_name) <= 110
    assert set(key.file_name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
    assert key.file_name.count(".") == 1


def test_people_can_tell_files_apart():
    assert KEY.file_name.startswith("nvidia-h200-32-heads-4-of-128-b16-t15-")


@pytest.mark.parametrize("field", OTHERS)
def test_a_file_of_another_key_under_this_name_is_not_used(tmp_path, field):
    other = replace(CALIBRATION, key=replace(KEY, **{field: OTHERS[field]}))
    path = other.save(tmp_path).rename(tmp_path / KEY.file_name)
    assert "it is for ProfileKey" in assert_told_once(tmp_path, path)


@given(st.data())
def test_a_truncated_file_is_told_of(data):
    with folders() as folder:
        path = CALIBRATION.save(folder)
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        assert_told_once(folder, path)
        NEWER.save(folder)
        assert load(folder) == (NEWER, [])


@given(st.data())
def test_a_file_with_another_byte_says_the_same_or_is_told_of(data):
    with folders() as folder:
        path = CALIBRATION.save(folder)
        whole = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
        found, told = load(folder)
        if found is None:
            assert len(told) == 1
        else:  # a space became a tab, an e an E
            assert (found, told) == (CALIBRATION, [])


def test_each_digit_counts(tmp_path):
    path = CALIBRATION.save(tmp_path)
    whole = path.read_text()
    digits = [i for i, letter in enumerate(whole) if letter.isdigit()]
    assert len(digits) > 150
    for at in digits:
        path.write_text(whole[:at] + str((int(whole[at]) + 1) % 10) + whole[at + 1 :])
        assert_told_once(tmp_path, path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"3",
        b'"version"',
        b"\xff\xfe",
        b"\0" * 64,
        b"[" * 100_000,
        b"9" * 10_000,
        b'{"version": 1, "calibration": Infinity, "sha256": NaN}',
        b'{"version": 1, "sha256": "", "calibration": {"key": "\\ud800"}}',
        b'{"version": 1, "sha256": "", "calibration": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    ],
)
def test_a_file_of_something_else_is_told_of(tmp_path, content):
    path = tmp_path / KEY.file_name
    path.write_bytes(content)
    assert_told_once(tmp_path, path)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def write(path, content, version=VERSION):
    """A file whose hash is right."""
    whole = {"version": version, "sha256": _hash(content), "calibration": content}
    path.write_text(json.dumps(whole))


@given(st.data(), json_values)
def test_a_file_with_a_right_hash_of_something_else_is_told_of(data, value):
    with folders() as folder:
        path = CALIBRATION.save(folder)
        holder = {"all": json.loads(path.read_bytes())["calibration"]}
        content, name = holder["all"], data.draw(st.sampled_from([None, *holder["all"]]))
        if name is None:
            holder["all"] = value
        elif isinstance(content[name], dict) and data.draw(st.booleans()):
            content[name][data.draw(st.sampled_from(sorted(content[name])))] = value
        else:
            content[name] = value
        write(path, holder["all"])
        found, told = load(folder)
        if found is None:
            assert len(told) == 1
        else:  # a number became another number, say
            assert (found.key, told) == (KEY, [])


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, "1", None])
def test_a_file_of_another_version_is_told_of(tmp_path, version):
    path = CALIBRATION.save(tmp_path)
    write(path, json.loads(path.read_bytes())["calibration"], version)
    assert "version" in assert_told_once(tmp_path, path)


def test_a_file_that_cannot_be_read_is_told_of(tmp_path):
    path = tmp_path / KEY.file_name
    path.mkdir()
    assert_told_once(tmp_path, path)


def test_a_file_without_the_fields_of_today_is_told_of(tmp_path):
    path = CALIBRATION.save(tmp_path)
    content = json.loads(path.read_bytes())["calibration"]
    del content["machine"]["hbm_gbs"]
    write(path, content)
    assert "hbm_gbs" in assert_told_once(tmp_path, path)


def assert_old_or_new(folder, was_there):
    """No broken file, and no other."""
    names = os.listdir(folder) if folder.exists() else []
    assert names in ([], [KEY.file_name])
    assert names or not was_there
    found, told = load(folder)
    assert found in ((CALIBRATION, NEWER) if was_there else (None, NEWER))
    assert not told


@contextlib.contextmanager
def interrupted_at(line):
    """Ctrl-C at the nth line of the saving, the standard library's for files included."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        name = frame.f_code.co_filename
        if not any(part in name for part in ("calibration.py", "pathlib", f"{os.sep}os.py")):
            return None
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("was_there", [False, True])
def test_ctrl_c_at_any_line_leaves_no_broken_file(was_there):
    for line in range(1, 1000):
        with folders() as folder:
            if was_there:
                CALIBRATION.save(folder)
            try:
                with interrupted_at(line):
                    NEWER.save(folder)
            except KeyboardInterrupt:
                assert_old_or_new(folder, was_there)
            else:
                assert load(folder) == (NEWER, [])
                break
    assert 20 < line < 999


@pytest.mark.parametrize("was_there", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "half way"])
@pytest.mark.parametrize("call", ["Path.mkdir", "Path.write_text", "os.replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_call_that_fails_leaves_no_broken_file(
    tmp_path, monkeypatch, was_there, when, call, error
):
    if was_there:
        CALIBRATION.save(tmp_path)
    owner, name = {"Path": Path, "os": os}[call.split(".")[0]], call.split(".")[1]
    real = getattr(owner, name)

    def failing(*arguments, **options):
        if when == "after":
            real(*arguments, **options)
        if when == "half way" and name == "write_text":
            path, text = arguments
            real(path, text[: len(text) // 2], **options)
        raise error

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        NEWER.save(tmp_path)
    monkeypatch.undo()
    assert_old_or_new(tmp_path, was_there)
    NEWER.save(tmp_path)
    assert load(tmp_path) == (NEWER, [])


def test_profiles_lie_beside_the_native_library(monkeypatch, tmp_path):
    for cache, xdg in ((str(tmp_path), "/x"), ("", str(tmp_path)), ("", "")):
        monkeypatch.setenv("SPARSEKV_CACHE", cache)
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert profile_folder() == build.cache_folder() / "profiles"
    monkeypatch.delenv("SPARSEKV_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profile_folder() == build.cache_folder() / "profiles"


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), None])
def test_residuals_that_are_none_are_refused(value):
    with pytest.raises(LayoutError, match=r"^residual=.*; take it from fit"):
        replace(CALIBRATION, residual=value)


def test_a_way_to_read_is_one_of_two():
    with pytest.raises(LayoutError, match=r"^reads_in_place=1: must be True or False"):
        replace(CALIBRATION, reads_in_place=1)


@pytest.mark.parametrize("field", OTHERS)
def test_keys_of_nothing_are_refused(field):
    with pytest.raises(LayoutError, match=f"^{field}=None: must be "):
        replace(KEY, **{field: None})
