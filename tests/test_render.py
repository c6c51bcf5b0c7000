"""The documents show the results, and nothing but the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import attention_checks, ceilings, render
from benchmarks.plots import digest, draw_scaling, has_scaling, plot_name
from benchmarks.results import ROOT, Result, Row, load_results, make_result, write_result

SHOWN = [result for result in load_results("cpu_attention") if has_scaling(result)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of three topics."""
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
