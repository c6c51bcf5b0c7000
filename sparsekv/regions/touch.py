"""Committing pages ahead of their use: the kernel clears them, in several threads at once where
there are many.

Registering pages that nobody has touched makes the driver clear them, on one thread and while no
kernel can be launched.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading

_MADV_POPULATE_WRITE = 23
_PIECE_BYTES = 2 << 20
"""Pieces are multiples of the huge page: two threads must not wait for the same one."""
_INLINE_BYTES = 1 << 20
"""Up to here starting a thread takes longer than clearing the pages."""
_BYTES_PER_THREAD = 32 << 20
_MAX_THREADS = 16
"""A memory bus is full long before a big machine's cores are."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


class Touch:
    """Bytes `start` to `end` from an address on, being committed. Their content, which nobody may
    have written yet, stays or becomes zeros.

    Args:
        owner: held until the last thread is done; keeps the addresses mapped.
    """

    def __init__(self, address: int, start: int, end: int, owner: object) -> None:
        self.start = start
        self.end = end
        self._threads: list[threading.Thread] = []
        if end - start <= _INLINE_BYTES:
            _commit(address + start, end - start, owner)
            return
        for first, last in pieces(address + start, address + end, num_threads(end - start)):
            # A daemon: nobody need wait at exit for pages that nobody will use.
            thread = threading.Thread(
                target=_commit,
                args=(first, last - first, owner),
                name="sparsekv-touch",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter is closing
                _commit(first, last - first, owner)
                continue
            self._threads.append(thread)

    @property
    def is_done(self) -> bool:
        """Whether every page is there."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self) -> None:
        """Return when every page is there."""
        for thread in self._threads:
            thread.join()


def num_threads(num_bytes: int) -> int:
    """Threads that commit so many bytes: no more than CPUs that this process may use."""
    wanted = -(-num_bytes // _BYTES_PER_THREAD)
    return max(min(wanted, len(os.sched_getaffinity(0)), _MAX_THREADS), 1)


def pieces(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """At most `count` neighbouring ranges that make up addresses `first` to `last`, about equal,
    cut between huge pages.
    """
    cuts = [first + (last - first) * i // count for i in range(1, count)]
    inner = sorted({cut // _PIECE_BYTES * _PIECE_BYTES for cut in cuts})
    bounds = [first, *[cut for cut in inner if first < cut < last], last]
    return list(itertools.pairwise(bounds))


def _commit(address: int, num_bytes: int, owner: object) -> None:
    """Commit pages. Both calls run without the interpreter's lock. `owner` lives until then."""
    if _libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE) and _is_unknown():
        _libc.memset(address, 0, num_bytes)


def _is_unknown() -> bool:
    """Whether the last call failed because the kernel (before 5.14) does not know it; any other
    failure the registration will meet, and report, itself.
    """
    return ctypes.get_errno() == errno.EINVAL
