"""Keeps what libraries say while they load off the screen of a program that has its own bars."""

from __future__ import annotations

import logging


def quiet_libraries() -> None:
    """Silence bars, advice and complaints about optional parts; call before importing models.

    transformers imports torchao where it is installed, and torchao reports each kernel of its own
    that this machine cannot load.
    """
    import torch  # sets up its loggers, so that the next lines have the last word  # noqa: F401

    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)

    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
