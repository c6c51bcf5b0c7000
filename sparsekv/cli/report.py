"""What a finished run says about itself: region table, speed, comparison; as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsekv.cli.console import print_table, stdout_console
from sparsekv.cli.sizes import format_bytes
from sparsekv.cli.streaming import Generated
from sparsekv.format import CacheStats

_COLUMNS = ["region", "memory", "tokens", "bytes", "share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The facts of one run."""

    prompt_tokens: int
    generated: Generated
    reference: Generated | None
    """The unpatched model's answer; None: it was not asked for."""
    stats: CacheStats
    dtype: torch.dtype

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
            "regions": [
                {
                    "name": region.name,
                    "memory": region.memory,
                    "tokens": region.tokens,
                    "bytes": region.used_bytes,
                    "share": region.share,
                }
                for region in self.stats.regions
            ],
        }
        if self.reference:
            result["identical_tokens"] = self.identical_tokens
            result["compared_tokens"] = self.compared_tokens
        return result


def print_result(result: RunResult) -> None:
    """Write the table, then one line for each model, then the comparison."""
    console = stdout_console()
    rows = [
        [
            region.name,
            region.memory,
            f"{region.tokens:,}",
            format_bytes(region.used_bytes),
            f"{region.share:.1%}",
        ]
        for region in result.stats.regions
    ]
    console.print()
    print_table("KV cache by region", _COLUMNS, rows)
    console.print(_speed("sparsekv", result.prompt_tokens, result.generated))
    if result.reference:
        console.print(_speed("unpatched", result.prompt_tokens, result.reference))
        style = "bold green" if result.is_identical else "bold red"
        console.print(_comparison(result), style=style, soft_wrap=True)


def _speed(label: str, prompt_tokens: int, generated: Generated) -> str:
    prefill = f"{label}: prefill {prompt_tokens:,} tokens in {generated.prefill_s:.1f} s"
    steps = len(generated.tokens) - 1
    return f"{prefill}, decode {steps / generated.decode_s:.1f} tokens/s" if steps else prefill


def _comparison(result: RunResult) -> str:
    counts = f"{result.identical_tokens} of {result.compared_tokens} tokens"
    line = f"identical to the unpatched model: {counts}"
    if not result.is_identical and result.dtype != torch.float32:
        # Two ways of rounding the same sum may choose another token, after which the texts part.
        dtype = str(result.dtype).removeprefix("torch.")
        line += f" (in {dtype}: use --dtype float32 to rule out rounding)"
    return line
