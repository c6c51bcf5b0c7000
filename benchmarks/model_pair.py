"""Two models that decode at once: in two processes, as two users of a machine have them, or in two
threads of one, as a server has them, on one GPU or on two.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from threading import Thread
from typing import Any, NamedTuple

import torch

from benchmarks.cache_steps import CacheSteps
from benchmarks.decode_case import Case
from benchmarks.decode_rounds import attending_threads
from sparsekv.roofline import CostModel

ONE_PROCESS, TWO_PROCESSES, TWO_GPUS = "one process", "two processes", "two GPUs"
_WARM_UP = 3


class Turn(NamedTuple):
    """Of one of the two."""

    ms_per_layer: float
    share: float
    """At the end."""
    cost: CostModel
    """That is followed by then."""


class ModelPair:
    """Use as a context manager: both end with it.

    Args:
        where: ONE_PROCESS, whose attending threads they share, TWO_PROCESSES, or TWO_GPUS of one
            process, and the one memory.
        num_threads: threads of a process that attend; None: the library's own number.
    """

    def __init__(self, where: str, num_threads: int | None) -> None:
        self._where = where
        self._num_threads = num_threads
        self._users: list[Connection] = []
        self._stack = ExitStack()

    def __enter__(self) -> ModelPair:
        if self._where != TWO_PROCESSES:
            self._stack.enter_context(attending_threads(self._num_threads))
        spawning = get_context("spawn")  # a fork has no CUDA
        for _ in range(2):
            ours, theirs = Pipe()
            user: Thread | SpawnProcess
            if self._where != TWO_PROCESSES:
                user = Thread(target=_use, args=(theirs,), daemon=True)
                user.start()
            else:
                arguments = theirs, self._num_threads
                user = spawning.Process(target=_use_alone, args=arguments, daemon=True)
                user.start()
                theirs.close()  # so that its end is seen
            self._stack.callback(user.join)
            self._stack.callback(ours.close)
            self._users.append(ours)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @contextmanager
    def decoding(self, case: Case, cost: CostModel) -> Iterator[None]:
        """Both have a cache of the case, placed by these costs, within the body."""
        cases = [case, case]
        if self._where == TWO_GPUS:
            cases = [replace(case, device=torch.device("cuda", i)) for i in range(2)]
        self._ask(*((case, cost) for case in cases))
        yield
        self._ask(None, None)

    def decode(self, share: float | None, seconds: float) -> list[Turn]:
        """Let both decode for so long; what came of it, of each.

        Args:
            share: of the CPU; None: an elastic one.
        """
        return self._ask(*2 * [(share, seconds)])

    def _ask(self, *questions: object) -> list[Any]:
        """The answers of both."""
        for user, question in zip(self._users, questions, strict=True):
            user.send(question)
        return [user.recv() for user in self._users]


def _use_alone(asking: Connection, num_threads: int | None) -> None:
    """`_use`, in a process of its own."""
    with attending_threads(num_threads):
        _use(asking)


def _use(asking: Connection) -> None:
    """Serve one of the two, until it is left alone."""
    try:
        while True:
            case, cost = asking.recv()
            # A stream of its own: on that of all, they would take turns.
            stream = torch.cuda.Stream(case.device) if case.device.type == "cuda" else None
            with torch.cuda.stream(stream):
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
