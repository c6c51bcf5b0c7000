"""`sparsekv.plan`: from what a user names, a model and a machine, to a plan."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from sparsekv.engine.config import CacheConfig
from sparsekv.engine.machine_choice import choose_budget, choose_rates
from sparsekv.engine.planner import Plan, plan_run
from sparsekv.format.compressed import EntryFormat
from sparsekv.models.sizes import find_size
from sparsekv.roofline import Calibration, MachineProfile

_PROMPT_TOKENS = 2048
"""The prompt of the paper's runs (arXiv:2609.14507, section 7)."""


def plan(
    model: str | os.PathLike[str] | Any,
    *,
    batch_size: int = 1,
    num_tokens: int = 32768,
    prompt_tokens: int = _PROMPT_TOKENS,
    cpu_share: float | Literal["auto"] = "auto",
    machine: str | MachineProfile | Calibration | None = None,
    ram_bytes: int | None = None,
    vram_bytes: int | None = None,
    window_size: int = 256,
    block_size: int = 64,
    dtype: torch.dtype | None = None,
    entry_format: EntryFormat = "native",
) -> Plan:
    """What a run will take, whether it fits, and how long its decode steps will be.

    Nothing is loaded or measured. The forecast is a model: attention of both engines at once, by
    the machine's rates, then one reading of the weights that a step uses from GPU memory, routed
    experts as if each were as likely as any other. Computation, launches and sampling are not in
    it, so that a real step takes longer.

    Args:
        model: a known name ("qwen3-30b-a3b"), a model folder, a `config.json`, or a configuration
            of transformers.
        batch_size: sequences at a time.
        num_tokens: context of each sequence, at its longest.
        prompt_tokens: how much of it is placed at once, at the share that is best for it; what
            follows is placed at the marginal share.
        cpu_share: share of the placed tokens that the CPU attends to; "auto": as the rates have it.
        machine: a preset's name ("h200", "a100", "v100"), a profile, a calibration, or "this": what
            was measured here for this model and batch. None: that where it exists, else the preset
            "h200", which `Plan.rates.origin` then calls a stand-in.
        ram_bytes: host memory for the cache; None: what the machine has to give.
        vram_bytes: GPU memory for weights and cache; None: what the machine has.
        window_size: newest tokens (DeepSeek-V4: compressed entries) on the GPU.
        block_size: tokens of a block; `window_size` is a multiple of it.
        dtype: of weights and cache; None: the configuration's own, or bfloat16.
        entry_format: DeepSeek-V4's entries on the CPU: "native", or "packed" into 584 bytes.
    Raises:
        UnsupportedModelError: no such model, or one that sparsekv does not support.
        LayoutError: a number, share or size that breaks a rule; no such machine; "this" where
            nothing was measured; or a calibration for another model or batch.
    """
    config = CacheConfig(window_size=window_size, block_size=block_size, entry_format=entry_format)
    size = find_size(model, dtype, entry_format)
    rates = choose_rates(machine, size, batch_size)
    return plan_run(
        size,
        rates=rates,
        budget=choose_budget(rates, ram_bytes, vram_bytes),
        config=config,
        batch_size=batch_size,
        num_tokens=num_tokens,
        prompt_tokens=prompt_tokens,
        cpu_share=cpu_share,
    )
