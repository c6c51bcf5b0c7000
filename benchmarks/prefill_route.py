"""Measure what it costs a prefill that its keys and values go to their regions at once.

Layers of the model's sizes read a prompt: projections, causal attention, and experts as dense
products of the same arithmetic (those that a token activates, side by side), so that the GPU is
at least as fast as with routed experts. They are timed with and without the append and flush of
each layer, in turn, until everything is in place; so is attention alone. The first routed
prefill, which also takes and registers the memory, has a row of its own. What a pass takes of the
GPU's memory at most is noted for the first plain and the first routed one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command import Report, finish, parser, print_table, run
from benchmarks.decode_case import Case
from benchmarks.decode_rounds import attending_threads, take_turns
from benchmarks.decode_ways import AttentionModule, attend_by_sdpa
from benchmarks.results import Check, Row
from sparsekv import CacheConfig, InplaceKVCache

LAYER, LAYER_ROUTED = "layer", "layer, routed"
ATTENTION, ATTENTION_ROUTED = "attention", "attention, routed"
FIRST = "layer, routed, first"
_PART = 0.01
_SHARE = 0.6
_WARM_UP = 1


@dataclass(frozen=True, slots=True)
class Width:
    """Numbers of a token between layers, and inside all experts that it activates."""

    hidden: int
    experts: int


_WIDTHS = {"qwen3": Width(2048, 8 * 768), "mixtral": Width(4096, 2 * 14_336)}
_QUICK_WIDTH = Width(64, 128)
_SIZES = {"qwen3": (16, 8192), "mixtral": (16, 4096)}
_QUICK_SIZE, _QUICK_LAYERS = (2, 512), 2


class PrefillLayers:
    """A prompt through all layers, which share one layer's weights.

    Args:
        case: shapes, layers, and the prompt's batch and length.
        width: the model's other sizes.
    """

    def __init__(self, case: Case, width: Width) -> None:
        self._case, self._module = case, AttentionModule(case.shape)
        shape, generator = case.shape, torch.Generator(case.device).manual_seed(0)

        def weight(num_out: int, num_in: int) -> Tensor:
            drawn = torch.randn(num_out, num_in, generator=generator, device=case.device)
            return (drawn * num_in**-0.5).to(torch.bfloat16)

        self._heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self._qkv = weight(sum(self._heads) * shape.head_dim, width.hidden)
        self._out = weight(width.hidden, shape.num_heads * shape.head_dim)
        self._up = [weight(width.experts, width.hidden) for _ in range(2)]
        self._down = weight(width.hidden, width.experts)
        tokens = (case.batch_size, case.context, width.hidden)
        self._prompt = torch.randn(tokens, generator=generator, device=case.device).to(
            torch.bfloat16
        )

    def layers(self, cache: InplaceKVCache | None) -> Tensor:
        """All layers; keys and values go to `cache` where there is one."""
        hidden = self._prompt
        for layer_idx in range(self._case.num_layers):
            out = self._attend(cache, layer_idx, *self._project(self._norm(hidden)))
            hidden = hidden + F.linear(out.transpose(1, 2).flatten(2), self._out)
            gate, up = (F.linear(self._norm(hidden), matrix) for matrix in self._up)
            hidden = hidden + F.linear(F.silu(gate).mul_(up), self._down)
        self._wait(cache)
        return hidden

    def attention(self, cache: InplaceKVCache | None) -> Tensor:
        """Attention of all layers to the same queries, keys and values."""
        query, key, value = self._project(self._prompt)
        for layer_idx in range(self._case.num_layers):
            out = self._attend(cache, layer_idx, query, key, value)
        self._wait(cache)
        return out

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = F.linear(hidden, self._qkv).unflatten(2, (-1, self._case.shape.head_dim))
        query, key, value = heads.transpose(1, 2).split(self._heads, dim=1)
        # As rotary embedding leaves them; values stay a view.
        return query.contiguous(), key.contiguous(), value

    def _attend(
        self,
        cache: InplaceKVCache | None,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        if cache is not None:
            cache.append(layer_idx, key, value)
        out = attend_by_sdpa(self._module, query, key, value)
        if cache is not None:
            cache.flush(layer_idx)
        return out

    def _norm(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:])

    def _wait(self, cache: InplaceKVCache | None) -> None:
        """Return when every layer's tokens are where they will be attended."""
        if cache is not None:
            for layer_idx in range(self._case.num_layers):
                cache.views(layer_idx)


def measure_case(case: Case, width: Width, rounds: int) -> Iterator[Row]:
    """Rows of one model."""
    prompt = PrefillLayers(case, width)
    config = CacheConfig(cpu_share=_SHARE)
    spec = config.spec(case.geometry, case.batch_size)
    cache = InplaceKVCache(spec, case.device, config.router())
    cache.reserve(case.context)

    def routed(run: Callable[[InplaceKVCache | None], Tensor]) -> Callable[[], None]:
        def step() -> None:
            cache.reset()
            run(cache)

        return step

    steps: dict[str, Callable[[], object]] = {
        LAYER: lambda: prompt.layers(None),
        LAYER_ROUTED: routed(prompt.layers),
        ATTENTION: lambda: prompt.attention(None),
        ATTENTION_ROUTED: routed(prompt.attention),
    }
    with torch.no_grad():
        prompt.layers(None)  # before anything counts
        peaks = {LAYER: _peak_bytes(steps[LAYER], case.device)}
        start = time.perf_counter()
        peaks[FIRST] = _peak_bytes(steps[LAYER_ROUTED], case.device)
        samples = {FIRST: [time.perf_counter() - start]}
        turns = take_turns(list(steps.values()), case.device, rounds, _WARM_UP)
        samples |= dict(zip(steps, turns, strict=True))
    for way, seconds in samples.items():
        yield {
            **case.known,
            "way": way,
            "share": _SHARE,
            "kv_bytes_per_layer": case.kv_bytes // case.num_layers,
            "ms_per_layer": 1e3 * median(seconds) / case.num_layers,
            "samples": [1e3 * s / case.num_layers for s in seconds],
            **({"gpu_bytes": peaks[way]} if peaks.get(way) else {}),
        }


def _peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Bytes on the GPU that a step took at most, beside what was there; 0 without CUDA."""
    if device.type != "cuda":
        step()
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def checks(rows: Sequence[Row]) -> list[Check]:
    """The cost of routing as a part of a layer's prefill; CUDA only."""
    found = []
    for shape in dict.fromkeys(row["shape"] for row in rows if row["device"].startswith("cuda")):
        here = {row["way"]: row for row in rows if row["shape"] == shape}
        plain, routed = here[LAYER], here[LAYER_ROUTED]
        pairs = zip(routed["samples"], plain["samples"], strict=True)
        found.append(
            Check(
                name=f"{shape}, {plain['size']}: cost of routing, part of a layer's prefill",
                value=median(after / before - 1 for after, before in pairs),
                target=_PART,
                lower_is_better=True,
            )
        )
    return found


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report()
    rows: list[Row] = []
    with attending_threads(arguments.threads) as num_threads:
        for name in arguments.shapes:
            batch_size, context = _QUICK_SIZE if arguments.quick else _SIZES[name]
            case = Case.of_model(name, batch_size, context, device)
            width = _QUICK_WIDTH if arguments.quick else _WIDTHS[name]
            if arguments.quick:
                case = case.with_layers(_QUICK_LAYERS)
            for row in measure_case(case, width, arguments.rounds):
                rows.append({**row, "num_threads": num_threads})
                report(f"{name}, {case.size}, {row['way']}: {row['ms_per_layer']:.2f} ms a layer")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__, rounds=3, scales=False)
    options.add_argument(
        "--shapes",
        nargs="+",
        choices=_WIDTHS,
        default=["qwen3"],
        help="models to measure (default: qwen3)",
    )
    arguments = options.parse_args(argv)
    rows = measure(arguments)
    lines = [(r["shape"], r["size"], r["layers"], r["way"], r["ms_per_layer"]) for r in rows]
    print_table("prefill", ("shape", "size", "layers", "what", "ms a layer"), lines)
    finish("prefill_route", rows, checks, arguments)


if __name__ == "__main__":
    run(main)
