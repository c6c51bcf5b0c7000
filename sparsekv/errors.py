"""The kinds of error sparsekv raises.

Each is also the built-in kind a caller would expect, so `except ValueError` keeps working. Messages
say what was given, which rule holds and what to do. An error is raised before anything has changed.
"""

__all__ = [
    "CacheStateError",
    "CapacityError",
    "FormatError",
    "LayoutError",
    "SparseKVError",
    "UnsupportedModelError",
]


class SparseKVError(Exception):
    """Base of every error raised by sparsekv."""


class LayoutError(SparseKVError, ValueError):
    """A shape, dtype, device or setting breaks a rule of the format."""


class CapacityError(SparseKVError, MemoryError):
    """Tokens or bytes do not fit: over `max_tokens`, over the machine's memory, or refused by the
    system.
    """


class UnsupportedModelError(SparseKVError, TypeError):
    """A model, or something asked of a model, that sparsekv cannot compute correctly."""


class CacheStateError(SparseKVError, RuntimeError):
    """A cache used where it cannot answer: after `restore`, in a forked child, with another model,
    half a step.
    """


class FormatError(SparseKVError, ValueError):
    """A saved cache that is truncated, foreign, newer than this version, or made for another
    geometry.
    """
