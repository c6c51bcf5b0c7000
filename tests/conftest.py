"""Hypothesis profiles. `ci` is chosen where CI is set; HYPOTHESIS_PROFILE names another one."""

import os

import torch
from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "dev",
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile(
    "ci",
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile(
    "nightly",
    max_examples=2000,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") == "true" else "dev")
)

torch.manual_seed(0)
