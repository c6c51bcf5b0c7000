"""Decode steps of attention alone over one cache, whose share is decided elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.decode_case import Case
from sparsekv import CacheConfig, InplaceKVCache, ShareRouter
from sparsekv.attention import DecodeAttention
from sparsekv.engine import attend
from sparsekv.engine.balance import Balance
from sparsekv.roofline import CostModel


class CacheSteps:
    """One cache of a case, filled with its context, and its steps.

    Args:
        case: layers, batch and context.
        router: where segments go.
        balance: what follows the costs, and decides the share of a step where it is elastic.
    """

    def __init__(self, case: Case, router: ShareRouter, balance: Balance | None = None) -> None:
        self._case = case
        spec = CacheConfig(cpu_share=0.5).spec(case.geometry, case.batch_size)
        self.cache = InplaceKVCache(spec, case.device, router)
        self.cache.balance = self._balance = balance
        self.cache.reserve(2 * case.context)
        self._query, self._token = case.query(), case.new_token()
        prompt = case.prompt()
        for layer_idx in range(case.num_layers):
            self.cache.append(layer_idx, *prompt)
            self.cache.flush(layer_idx)

    @classmethod
    def by_costs(cls, case: Case, cost: CostModel, *, is_elastic: bool = False) -> CacheSteps:
        """Placed as the library would with these costs.

        Args:
            case: as above.
            cost: of a layer.
            is_elastic: place less, and choose the share of each step.
        """
        balance = Balance(cost, is_elastic=is_elastic)
        balance.begin(case.context)
        return cls(case, balance.router, balance)

    @classmethod
    def borrowing(cls, case: Case) -> CacheSteps:
        """All pinned, so that any share can be set, and nothing moves from one to the next."""
        return cls(case, ShareRouter(0.0))

    @property
    def share(self) -> float:
        """Of the next step."""
        return self.cache.stats().cpu_share

    @property
    def cost(self) -> CostModel:
        """That the balance follows."""
        assert isinstance(self._balance, Balance)
        return self._balance.cost

    @contextmanager
    def at_share(self, share: float) -> Iterator[None]:
        """The steps in the body have that share, or what is placed if that is more, and nobody
        follows their costs. On the same memory, which is not everywhere as fast.
        """
        before = self.cache.step_share
        self.cache.balance = None
        self.cache.step_share = max(share, self.cache.router.marginal_share)
        try:
            yield
        finally:
            self.cache.balance, self.cache.step_share = self._balance, before
            if isinstance(self.cache.companion, DecodeAttention):
                self.cache.companion.timings.steps.take()  # not of the share that follows

    def step(self, num_steps: int = 1) -> Tensor:
        """So many tokens, one after the other; the last one's attention of the last layer."""
        for _ in range(num_steps):
            for layer_idx in range(self._case.num_layers):
                self.cache.append(layer_idx, *self._token)
                out = attend(self.cache, layer_idx, self._query, self._case.shape.softmax_scale)
        return out

    def sample(self, num_steps: int = 1) -> float:
        """Milliseconds of a layer, until the last one's attention is there."""
        self.wait()
        start = time.perf_counter()
        self.step(num_steps)
        self.wait()
        return 1e3 * (time.perf_counter() - start) / num_steps / self._case.num_layers

    def wait(self) -> None:
        """Return when the steps are done. Others may keep the device busy: waiting for the whole
        device would not end.
        """
        if self._case.device.type == "cuda":
            torch.cuda.current_stream(self._case.device).synchronize()
