"""What a finished run says about itself: region table, speed, comparison; as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import torch

from sparsekv.cli.console import print_table, stdout_console
from sparsekv.cli.sizes import format_bytes
from sparsekv.cli.streaming import Generated
from sparsekv.format import CacheStats
from sparsekv.format.compressed import EntryFormat
from sparsekv.format.statistics import CompressedStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The facts of one run."""

    prompt_tokens: int
    generated: Generated
    reference: Generated | None
    """The unpatched model's answer; None: it was not asked for."""
    stats: CacheStats | CompressedStats
    """The second for DeepSeek-V4."""
    asked_share: float | Literal["auto"]
    """The CPU's share, as it was asked for."""
    dtype: torch.dtype
    entry_format: EntryFormat

    @property
    def identical_tokens(self) -> int:
        """Positions at which both models chose the same token; 0 without a reference."""
        theirs = self.reference.tokens if self.reference else []
        return sum(a == b for a, b in zip(self.generated.tokens, theirs, strict=False))

    @property
    def compared_tokens(self) -> int:
        """Tokens of the longer answer; 0 without a reference."""
        if self.reference is None:
            return 0
        return max(len(self.generated.tokens), len(self.reference.tokens))

    @property
    def is_identical(self) -> bool:
        """Whether no compared token differs."""
        return self.reference is None or self.generated.tokens == self.reference.tokens

    def as_dict(self) -> dict[str, object]:
        """The facts as JSON holds them: seconds, bytes, and shares from 0 to 1."""
        result: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.generated.tokens),
            "prefill_s": self.generated.prefill_s,
            "decode_s": self.generated.decode_s,
            "cpu_share": self.stats.cpu_share,
            "share": self._share(),
            **_places(self.stats, self.pool),
        }
        if self.reference:
            result["identical_tokens"] = self.identical_tokens
            result["compared_tokens"] = self.compared_tokens
        return result

    @property
    def pool(self) -> CacheStats:
        """The four regions."""
        return self.stats.pool if isinstance(self.stats, CompressedStats) else self.stats

    @property
    def share_lines(self) -> list[str]:
        """The CPU's share in use, and where it balances itself, what is aimed at and measured."""
        what = "entries" if isinstance(self.stats, CompressedStats) else "tokens"
        line = f"CPU share of placed {what} {self.pool.share_summary}"
        if self.pool.balance is not None:
            return [line, str(self.pool.balance)]
        if self.asked_share == "auto":
            line += "; auto aims at one half where nothing is measured"
        return [line]

    def _share(self) -> dict[str, object]:
        balance = self.pool.balance
        return {
            "asked": self.asked_share,
            "in_use": self.pool.cpu_share,
            "placed": self.pool.placed_share,
            "balance": None if balance is None else asdict(balance),
        }


def print_result(result: RunResult) -> None:
    """Write the table, then one line for each model, then the comparison."""
    console = stdout_console()
    console.print()
    if isinstance(result.stats, CompressedStats):
        _print_kinds(result.stats)
    else:
        _print_regions(result.stats)
    for line in (*result.share_lines, result.pool.host_summary):
        console.print(line, soft_wrap=True)
    console.print(_speed("sparsekv", result.prompt_tokens, result.generated))
    if result.reference:
        console.print(_speed("unpatched", result.prompt_tokens, result.reference))
        style = "bold green" if result.is_identical else "bold red"
        console.print(_comparison(result), style=style, soft_wrap=True)


def _places(stats: CacheStats | CompressedStats, pool: CacheStats) -> dict[str, object]:
    """Each region, or what each kind of layer keeps where, and host memory, as JSON holds it."""
    host = {
        "used_bytes": pool.host_used_bytes,
        "committed_bytes": pool.host_committed_bytes,
        "buffer_bytes": pool.buffer_bytes,
        "registered_bytes": pool.registered_bytes,
        "longest_registration_s": pool.longest_registration_s,
    }
    if isinstance(stats, CompressedStats):
        return {
            "host_memory": host,
            "layers": [
                {
                    "kind": row.kind,
                    "num_layers": row.num_layers,
                    "name": row.name,
                    "memory": row.memory,
                    "entries": row.entries,
                    "bytes": row.used_bytes,
                }
                for row in stats.kinds
            ],
        }
    return {
        "host_memory": host,
        "regions": [
            {
                "name": region.name,
                "memory": region.memory,
                "tokens": region.tokens,
                "bytes": region.used_bytes,
                "share": region.share,
            }
            for region in stats.regions
        ],
    }


def _print_regions(stats: CacheStats) -> None:
    rows = [
        [
            region.name,
            region.memory,
            f"{region.tokens:,}",
            format_bytes(region.used_bytes),
            f"{region.share:.1%}",
        ]
        for region in stats.regions
    ]
    print_table("KV cache by region", ["region", "memory", "tokens", "bytes", "share"], rows)


def _print_kinds(stats: CompressedStats) -> None:
    rows = [
        [
            f"{row.num_layers} {row.kind}",
            row.name,
            row.memory,
            f"{row.entries:,}",
            format_bytes(row.used_bytes),
        ]
        for row in stats.kinds
    ]
    columns = ["layers", "what", "memory", "a layer", "bytes"]
    print_table("KV cache by kind of layer and region", columns, rows, num_words=3)


def _speed(label: str, prompt_tokens: int, generated: Generated) -> str:
    prefill = f"{label}: prefill {prompt_tokens:,} tokens in {generated.prefill_s:.1f} s"
    steps = len(generated.tokens) - 1
    return f"{prefill}, decode {steps / generated.decode_s:.1f} tokens/s" if steps else prefill


def _comparison(result: RunResult) -> str:
    counts = f"{result.identical_tokens} of {result.compared_tokens} tokens"
    line = f"identical to the unpatched model: {counts}"
    if result.is_identical:
        return line
    if result.entry_format == "packed":
        line += " (packed entries are rounded: use --entry-format native for exact ones)"
    elif result.dtype != torch.float32:
        # Two ways of rounding the same sum may choose another token, after which the texts part.
        dtype = str(result.dtype).removeprefix("torch.")
        line += f" (in {dtype}: use --dtype float32 to rule out rounding)"
    return line
