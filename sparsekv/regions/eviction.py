"""Eviction: full windows of one layer leave the accelerator for their slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor

from sparsekv.regions.layer import LayerStore, Progress
from sparsekv.regions.outbox import Outbox
from sparsekv.regions.window import Window


def evict(layer: LayerStore, window: Window, outbox: Outbox, names: Sequence[str]) -> Progress:
    """Send the next full windows of a layer to new slots: first the tokens in `window`, completed
    by pending ones, then pending ones alone.

    Args:
        names: region of each segment to place, whole windows of them.
    Returns:
        The layer's progress once they are placed; `layer.arrival` says when they will be there.
    Raises:
        CapacityError: no memory for slots. After any error the stacks must be trimmed.
    """
    progress, (per_window, num_rows) = layer.progress, window.elements.shape[:2]
    window_size = per_window * window.key.shape[3]
    firsts = {name: len(stack) for name, stack in layer.stacks.items()}
    for name, stack in layer.stacks.items():
        stack.push(names.count(name), num_rows)
    if progress.fill and (missing := window_size - progress.fill):
        window.write(progress.fill, *progress.narrow(0, missing))
    if progress.windows is not None:
        outbox.keep_up()
    # Of a prompt, attention and what else was enqueued since need not be waited for: the caller,
    # who waits where copies are behind, could enqueue nothing meanwhile.
    outbox.follow(None if progress.fill else layer.given)
    sources = [] if progress.windows is None else list(progress.windows)
    if progress.fill:
        sources.insert(0, window.elements)
    for start, source in zip(range(0, len(names), per_window), sources, strict=True):
        outbox.send(source, list(_targets(layer, names[start : start + per_window], firsts)))
    used = len(names) // per_window * window_size - progress.fill
    rest = progress.num_pending - used
    layer.arrival = outbox.arrival()
    if progress.fill:
        window.leave(layer.arrival.copied)
    pending = progress.narrow(used, rest) if rest else None
    return Progress(progress.num_segments + len(names), 0, pending)


def _targets(
    layer: LayerStore, names: Sequence[str], firsts: dict[str, int]
) -> Iterator[tuple[Tensor, bool]]:
    """Slots of the next segments, in runs, and whether they are registered; counts `firsts` up."""
    for name, group in groupby(names):
        count = len(list(group))
        for slots in layer.stacks[name].slots(firsts[name], count):
            yield slots, name == "pinned"
        firsts[name] += count
