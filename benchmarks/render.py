"""Put the tables of the result files into the documents: `python -m benchmarks.render`.

A document says where a table goes by a pair of comments, `<!-- results: NAME -->` and
`<!-- end of results -->`; what stands between them is replaced. Names are those of TABLES.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import decode_tables, share_tables, tables
from benchmarks.plots import draw_scaling, has_scaling
from benchmarks.results import FOLDER, ROOT, Result, load_results
from benchmarks.share_plot import draw_loads, draw_shares

DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")

TABLES: dict[str, tuple[str, Callable[[list[Result]], str]]] = {
    "ceilings": ("ceilings", tables.ceilings),
    "compute_sanitizer": ("compute_sanitizer", tables.compute_sanitizer),
    "cpu_attention": ("cpu_attention", tables.cpu_attention),
    "cpu_attention in short": ("cpu_attention", tables.cpu_attention_in_short),
    "cpu_gather": ("cpu_gather", tables.cpu_gather),
    "decode_attention": ("decode_attention", decode_tables.decode_attention),
    "decode_attention in short": ("decode_attention", decode_tables.decode_in_short),
    "gpu_attention": ("gpu_attention", tables.gpu_attention),
    "prefill_route": ("prefill_route", decode_tables.prefill_route),
    "share_tracking": ("share_tracking", share_tables.share_tracking),
    "share_under_load": ("share_under_load", share_tables.share_under_load),
}
"""By name: the topic whose results it shows, one for each machine, and what makes Markdown of them.
"""

_MARKED = re.compile(r"(<!-- results: (.*?) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def render(text: str, folder: Path = FOLDER) -> str:
    """A document's text with the tables of the results in `folder`.

    Raises:
        ValueError: a comment names no table.
    """

    def table(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"<!-- results: {name} -->: must be one of {', '.join(TABLES)}")
        topic, make = TABLES[name]
        results = load_results(topic, folder)
        return f"{start}\n{make(results) if results else 'Not measured yet.'}\n\n{end}"

    return _MARKED.sub(table, text)


def main() -> None:
    """Render all documents in place, and draw the pictures that they show."""
    for result in load_results("cpu_attention"):
        if has_scaling(result):
            draw_scaling(result, ROOT / "docs")
    for result in load_results("share_tracking"):
        draw_shares(result, ROOT / "docs")
    for result in load_results("share_under_load"):
        draw_loads(result, ROOT / "docs")
    for path in DOCUMENTS:
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
