"""Two processes that decode at once, each a model of its own: what two users of a machine do."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks.cache_steps import CacheSteps
from benchmarks.decode_case import Case
from benchmarks.decode_rounds import attending_threads
from sparsekv.roofline import CostModel

_WARM_UP = 3


class Turn(NamedTuple):
    """Of one of the two."""

    ms_per_layer: float
    share: float
    """At the end."""
    cost: CostModel
    """That is followed by then."""


class ModelPair:
    """Use as a context manager: the processes end with it.

    Args:
        num_threads: threads of each that attend; None: the library's own number.
    """

    def __init__(self, num_threads: int | None) -> None:
        self._num_threads = num_threads
        self._users: list[Connection] = []
        self._stack = ExitStack()

    def __enter__(self) -> ModelPair:
        spawning = get_context("spawn")  # a fork has no CUDA
        for _ in range(2):
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=_use, args=(theirs, self._num_threads), daemon=True)
            process.start()
            theirs.close()  # so that its end is seen
            self._stack.callback(process.join)
            self._stack.callback(ours.close)
            self._users.append(ours)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @contextmanager
    def decoding(self, case: Case, cost: CostModel) -> Iterator[None]:
        """Both have a cache of the case, placed by these costs, within the body."""
        self._ask((case, cost))
        yield
        self._ask(None)

    def decode(self, share: float | None, seconds: float) -> list[Turn]:
        """Let both decode for so long; what came of it, of each.

        Args:
            share: of the CPU; None: an elastic one.
        """
        return self._ask((share, seconds))

    def _ask(self, what: object) -> list[Any]:
        """The answers of both."""
        for user in self._users:
            user.send(what)
        return [user.recv() for user in self._users]


def _use(asking: Connection, num_threads: int | None) -> None:
    """Serve one of the two, until it is left alone."""
    with attending_threads(num_threads):
        try:
            while True:
                case, cost = asking.recv()
                _decode_case(asking, case, cost)
                gc.collect()
                asking.send(None)
        except EOFError:
            return


def _decode_case(asking: Connection, case: Case, cost: CostModel) -> None:
    steps = CacheSteps.by_costs(case, cost, is_elastic=True)
    steps.step(_WARM_UP)
    asking.send(None)
    while (asked := asking.recv()) is not None:
        share, seconds = asked
        with nullcontext() if share is None else steps.at_share(share):
            asking.send(_decode(steps, case, seconds))


def _decode(steps: CacheSteps, case: Case, seconds: float) -> Turn:
    steps.step(_WARM_UP)
    steps.wait()
    start, num_steps = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        steps.step()
        steps.wait()
        num_steps += 1
    ms_per_layer = 1e3 * passed / max(num_steps, 1) / case.num_layers
    return Turn(ms_per_layer, steps.share, steps.cost)
