"""The documents show the results, and nothing but the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import attention_checks, ceilings, decode_checks, prefill_route, render
from benchmarks.plots import digest, draw_scaling, has_scaling, plot_name
from benchmarks.results import ROOT, Result, Row, load_results, make_result, write_result

SHOWN = [result for result in load_results("cpu_attention") if has_scaling(result)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A result of every topic."""
    memory = {"bytes": 1 << 30, "huge_fraction": 1.0}
    rows = [
        {"what": "read", "num_threads": 4, "gbs": 43.21, "samples": [43.21], **memory},
        {"what": "copy, host to GPU", "num_threads": 0, "gbs": 55.1, "samples": [55.1]},
        {"what": "both", "num_threads": 4, "gbs": 91.3, "read_gbs": 40.1, "h2d_gbs": 51.2},
    ]
    write_result(make_result("ceilings", rows, ceilings.checks, "abacus"), tmp_path)
    write_result(attention(), tmp_path)
    rates = {"gbs": 12.34, "memcpy_gbs": 10.0, "stream_gbs": 15.0, "fraction": 0.82}
    rows = [{"way": "gather", "piece_bytes": 1024, "num_threads": 2, **rates}]
    gather = make_result("cpu_gather", rows, ceilings.checks, "abacus")
    write_result(gather, tmp_path)
    write_result(
        make_result("decode_attention", decode(), decode_checks.checks, "abacus"), tmp_path
    )
    known = {"shape": "qwen3", "size": "16 x 8K", "layers": 48, "device": "cuda"}
    rows = [
        {**known, "way": way, "ms_per_layer": ms, "samples": [ms]}
        for way, ms in ((prefill_route.LAYER, 40.0), (prefill_route.LAYER_ROUTED, 40.2))
    ]
    write_result(make_result("prefill_route", rows, prefill_route.checks, "abacus"), tmp_path)
    return tmp_path


def attention() -> Result:
    rows: list[Row] = [
        {"kind": "rate", "shape": "qwen3", "way": way, "num_threads": n, "gbs": gbs * n}
        | {"ceiling_gbs": 10.0 * n, "fraction": gbs / 10}
        for n in (1, 2, 4, 8)
        for way, gbs in (("avx512", 9.0), ("torch sdpa", 1.0))
    ]
    found = {"relative_error": 1.2e-6, "lse_error": 3e-8}
    rows.append({"kind": "error", "shape": "qwen3", "way": "avx512", **found})
    return make_result("cpu_attention", rows, attention_checks.checks, "abacus")


def decode() -> list[Row]:
    known: Row = {"shape": "qwen3", "size": "16 x 32K", "layers": 48, "device": "cuda"}
    ceilings = {"ceiling_read_gbs": 98.0, "ceiling_h2d_gbs": 55.0, "ceiling_gbs": 130.0}
    ceilings |= {"ceiling_both_read_gbs": 79.0, "ceiling_both_h2d_gbs": 51.0}
    rows: list[Row] = [
        {**known, **ceilings, "kind": "decode", "way": "sparsekv", "share": share}
        | {"ms_per_layer": ms, "kv_gbs": 1000 / ms, "fraction": 7.0 / ms}
        | {"cpu_gbs": 1000 / ms * share, "h2d_gbs": 1000 / ms * (1 - share)}
        | ({"exposed_cpu_ms": 1.25} if share else {})
        for share, ms in ((0.0, 20.0), (0.6, 8.0))
    ]
    lent = {"way": "sparsekv, placed at 0.5", "placed": 0.5, "share": 0.6, "ms_per_layer": 8.1}
    rates = {"kv_gbs": 123.0, "cpu_gbs": 73.8, "h2d_gbs": 49.2, "fraction": 0.86}
    rows.append({**known, **ceilings, **lent, **rates, "kind": "borrowing"})
    few = known | {"layers": 4}
    offloaded = {"way": "DynamicCache, offloaded", "ms_per_layer": 196.0, "kv_gbs": 5.5}
    rows.append({**few, **offloaded, "kind": "decode"})
    rows.append({**known, "kind": "left out", "part": "model", "reason": "too little memory"})
    rows.append({**known, "kind": "short", "way": "sparsekv", "us_per_layer": 61.5})
    steps = {"num_steps": 1000, "share": 0.6, "p50_ms": 30.0, "p99_ms": 31.0}
    leaving = {"share": 0.6, "p50_ms": 300.0, "evicting_ms": 305.0}
    rows.append({**known, **leaving, "kind": "evicting", "way": "sparsekv"})
    rows.append({**few, **steps, "kind": "steps", "way": "sparsekv"})
    alone = {"machine_p50_ms": 25.0, "machine_p99_ms": 26.5, "machine_samples": [25.0, 26.5]}
    rows.append({**rows[-1], **alone, "share": 0.7})
    slow = {"way": "pageable source", "share": 0.6, "ms_per_layer": 20.0, "relative_speed": 0.5}
    rates = {"kv_gbs": 50.0, "cpu_gbs": 30.0, "h2d_gbs": 20.0}
    rows.append({**few, **slow, **rates, "kind": "ablation"})
    whole = {"way": "sparsekv", "share": 0.6, "ms_per_layer": 16.4}
    rows.append({**few, **whole, **rates, "kind": "model"})
    return rows


def marked(name: str) -> str:
    return f"before\n<!-- results: {name} -->\nold\n<!-- end of results -->\nafter\n"


@pytest.mark.parametrize("path", render.DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_as_they_are_rendered(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "<!-- results: " in text
    assert render.render(text) == text, "run `make tables`"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("ceilings", "| 4 | 43.2 | 40.1 + 51.2 |"),
        ("ceilings", "| copy, host to GPU | 55.1 |"),
        ("cpu_attention", "| 8 | 80.0 | 72.0 (90 %) | 8.00 (10 %) |"),
        ("cpu_attention", "| qwen3 | avx512 | 1.2e-06 | 3.0e-08 |"),
        ("cpu_attention", "| qwen3, best, 8 threads: times torch's attention | 9 | at least 1.5 |"),
        ("cpu_attention in short", "| abacus, 8 threads | qwen3 | 72.0 (avx512) | 90 % | 8.00 |"),
        ("cpu_gather", "| 1,024 B, threads | memcpy | non-temporal | gather |"),
        ("decode_attention", "| share 0 | 48 | 20.00 | 50.0 | 0.00 | 50.0 | 130 | 35 % |  |"),
        (
            "decode_attention",
            "| **share 0.6** | 48 | 8.00 | 125 | 75.0 | 50.0 | 130 | 88 % | 1.25 |",
        ),
        ("decode_attention", "| share 0.6 | 8.10 | 123 | 73.8 | 49.2 | 130 | 86 % | 8.00 | 88 % |"),
        ("decode_attention", "| DynamicCache, offloaded | 4 | 196.00 | 5.50 |  |  |  |  |"),
        ("decode_attention", "reading 98.0 GB/s, host to GPU 55.0; together 79.0 and 51.0."),
        ("decode_attention", "| sparsekv | 61.5 |"),
        ("decode_attention", "| share 0.6 | 30.00 | 31.00 |\n"),
        ("decode_attention", "| share 0.7 | 30.00 | 31.00 | 25.00 | 26.50 | 1.06 |\n"),
        ("decode_attention", "| share 0.6 | 300.0 | 305.0 |\n"),
        ("decode_attention", "| pageable source | 0.6 | 20.00 | 50.0 | 30.0 | 20.0 | 0.50 |"),
        ("decode_attention", "| sparsekv, share 0.6 | 4 | 16.40 | 50.0 | 30.0 | 20.0 |"),
        ("decode_attention", "Left out: qwen3, 16 x 32K, model: too little memory"),
        (
            "decode_attention in short",
            "| abacus | qwen3, 16 x 32K | 0.6 | 8.00 | 125 | 88 % | 24.5 |",
        ),
        ("prefill_route", "| layer, routed | 48 | 40.20 |  |"),
        ("prefill_route", "part of a layer's prefill | 0.005 | at most 0.01 | yes |"),
        ("cpu_gather", "| 2 | 10.0 | 15.0 | 12.3 (82 %) |"),
    ],
)
def test_tables_show_the_rows(folder: Path, name: str, shown: str) -> None:
    text = render.render(marked(name), folder)
    assert shown in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert render.render(text, folder) == text


def test_every_table_says_so_where_there_is_no_result(tmp_path: Path) -> None:
    for name in render.TABLES:
        assert "Not measured yet." in render.render(marked(name), tmp_path)


def test_an_unknown_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="speed of light"):
        render.render(marked("speed of light"), tmp_path)


def test_a_picture_names_the_result_that_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = attention()
    path = draw_scaling(result, tmp_path)
    assert path.name == plot_name(result)
    first = path.read_bytes()
    assert digest(result).encode() in first
    assert draw_scaling(result, tmp_path).read_bytes() == first


@pytest.mark.parametrize("result", SHOWN, ids=plot_name)
def test_pictures_show_the_kept_results(result: Result) -> None:
    picture = (ROOT / "docs" / plot_name(result)).read_text(encoding="utf-8")
    assert digest(result) in picture, "run `make tables`"
