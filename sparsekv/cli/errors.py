"""The kind of error that only a command line has."""

from sparsekv.errors import SparseKVError


class CommandLineError(SparseKVError, ValueError):
    """An argument, file or folder that the command cannot use.

    The message says what was given, which rule holds and what to do.
    """
