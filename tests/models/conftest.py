"""Pairs of one model: as it is, and patched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import model_zoo
import pytest
import torch
import transformers

import sparsekv


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture
def make_patched() -> Iterator[Callable[..., Any]]:
    """Builds a model by name and patches it: (name, **CacheConfig changes) -> Patched. Restored at
    the end.
    """
    patches = []

    def make(name: str, **changes: Any) -> Any:
        changes.setdefault("cpu_share", model_zoo.SHARES.get(name, 0.5))
        patches.append(sparsekv.patch(model_zoo.build(name), model_zoo.small_config(**changes)))
        return patches[-1]

    yield make
    for patched in patches:
        patched.restore()


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=model_zoo.needs_cuda),
        pytest.param("cuda:1", marks=model_zoo.needs_second_cuda),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """The simulated accelerator, and CUDA where there is a device: the current one, and another."""
    return request.param


@pytest.fixture
def ids() -> torch.Tensor:
    """(3, 17) token ids: nearly three windows."""
    return torch.randint(1, 90, (3, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def padded(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same with rows of different length, padded on the left."""
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[2, :9] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}
