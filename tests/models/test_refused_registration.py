"""`generate` where the system begins to refuse page-locked memory, at each stage: the same tokens,
one warning, nothing left. On the simulated accelerator, and on CUDA.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_zoo import build, same_tokens

from sparsekv.device import CudaAccelerator, SimulatedAccelerator
from sparsekv.errors import CapacityError

ACCELERATORS = {"cpu": SimulatedAccelerator, "cuda": CudaAccelerator}


class Refusal:
    """Registers until a forward of the model, counted from 0, has begun; keeps the books."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, first_refused: int) -> None:
        self.registered: dict[int, int] = {}
        self.num_refused = self.num_forwards = 0
        register, unregister = kind.register, kind.unregister

        def refuse(accelerator: Any, address: int, num_bytes: int) -> None:
            if self.num_forwards > first_refused:
                self.num_refused += 1
                raise CapacityError("no more may be locked")
            register(accelerator, address, num_bytes)
            self.registered[address] = num_bytes

        def forget(accelerator: Any, address: int) -> None:
            unregister(accelerator, address)
            self.registered.pop(address, None)

        monkeypatch.setattr(kind, "register", refuse)
        monkeypatch.setattr(kind, "unregister", forget)

    def count(self, *arguments: Any) -> None:
        """A forward begins."""
        self.num_forwards += 1


@pytest.mark.parametrize(
    ("first_refused", "options"),
    [
        pytest.param(-1, {}, id="before the prompt"),
        pytest.param(0, {}, id="prompt"),
        pytest.param(1, {}, id="first step"),
        pytest.param(0, {"prefill_chunk_size": 5}, id="first chunk"),
        pytest.param(2, {"prefill_chunk_size": 5}, id="later chunk"),
    ],
)
def test_tokens_stay_the_same_where_registration_is_refused(
    make_patched: Callable[..., Any],
    ids: torch.Tensor,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    first_refused: int,
    options: dict[str, int],
) -> None:
    plain = build("qwen3_moe").to(device)
    patched = make_patched("qwen3_moe", cpu_share=0.25)
    patched.model.to(device)
    refusal = Refusal(monkeypatch, ACCELERATORS[device], first_refused)
    patched.model.register_forward_pre_hook(refusal.count)
    with caplog.at_level(logging.WARNING, "sparsekv"):
        same_tokens(plain, patched.model, ids.to(device), max_new_tokens=40, **options)
    assert refusal.num_refused
    said = [r.getMessage() for r in caplog.records if r.name.startswith("sparsekv")]
    assert len(said) == 1
    assert "no more may be locked" in said[0]
    patched.restore()
    gc.collect()
    assert not refusal.registered
