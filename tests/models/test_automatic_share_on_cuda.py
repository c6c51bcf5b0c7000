"""cpu_share="auto" on a CUDA device: measured once, followed by the steps, and exact."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from model_zoo import same_tokens
from transformers import Qwen3Config, Qwen3ForCausalLM

import sparsekv
from sparsekv.engine import costs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_BATCH, _PROMPT, _NEW, _WINDOW = 8, 6_000, 140, 64
"""Enough that steps wait for the engines: else the accelerator's times are its caller's."""


def _model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
    )
    return Qwen3ForCausalLM(config).cuda().eval()


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Profiles of this test alone; how often the machine is measured."""
    calibrate = Mock(side_effect=costs.calibrate)
    monkeypatch.setattr(costs, "calibrate", calibrate)
    monkeypatch.setattr(costs, "profile_folder", lambda: tmp_path)
    monkeypatch.setattr(costs, "_unsaved", {})
    return calibrate


def test_the_machine_is_measured_once_and_tokens_stay_the_same(
    measured: Mock, tmp_path: Path
) -> None:
    plain = _model()
    model = copy.deepcopy(plain)
    ids = torch.randint(0, 1000, (_BATCH, _PROMPT), device="cuda")
    for elastic in (False, True):
        config = sparsekv.CacheConfig(window_size=_WINDOW, elastic=elastic)
        with sparsekv.patch(model, config) as patched:
            same_tokens(plain, model, ids, max_new_tokens=_NEW)
            stats = patched.stats()
        balance = stats.balance
        assert balance.measured_cpu_s > 0
        assert balance.measured_gpu_s > 0
        assert balance.predicted_s > 0
        assert 0 < stats.placed_share <= stats.cpu_share < 1
        assert abs(stats.cpu_share - balance.target_share) < 0.05
    assert measured.call_count == 1
    assert len(list(tmp_path.iterdir())) == 1
