"""Memory nodes: on a machine with several, host regions are spread over all that this process's
CPUs belong to.

Every CPU attends to every layer, and the accelerator reads every layer; pages that all lie on the
node of the thread that touched them first would be read through that node's channels alone.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import platform
from pathlib import Path

_MPOL_INTERLEAVE = 3
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_NODES = "/sys/devices/system/node"

_libc = ctypes.CDLL(None, use_errno=True)
logger = logging.getLogger(__name__)


def interleave(address: int, num_bytes: int) -> None:
    """Let pages of a range that are not committed yet go to the nodes in turn; nothing to do where
    there is one.
    """
    nodes = nodes_in_use()
    if len(nodes) > 1 and not _spread(address, num_bytes, nodes):
        _warn(nodes)


def can_interleave() -> bool:
    """Whether the system lets this process spread memory over its nodes; true where there is one.

    Containers often refuse it.
    """
    nodes = nodes_in_use()
    if len(nodes) < 2:
        return True
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        first = ctypes.c_char.from_buffer(page)
        is_spread = _spread(ctypes.addressof(first), mmap.PAGESIZE, nodes)
        del first  # a page that is looked at cannot be unmapped
    return is_spread


def _spread(address: int, num_bytes: int, nodes: tuple[int, ...]) -> bool:
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    number = _SYS_MBIND.get(platform.machine())
    num_bits = 8 * ctypes.sizeof(mask) + 1  # the kernel reads one bit less than it is told
    return number is not None and not _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_long(_MPOL_INTERLEAVE),
        ctypes.byref(mask),
        ctypes.c_ulong(num_bits),
        ctypes.c_ulong(0),
    )


@functools.cache
def nodes_in_use() -> tuple[int, ...]:
    """The memory nodes of the CPUs that this process may run on, below 64."""
    try:
        with_memory = parse_list((Path(_NODES) / "has_memory").read_text())
        cpus = os.sched_getaffinity(0)
        return tuple(
            node
            for node in sorted(with_memory)
            if node < 64 and cpus & parse_list((Path(_NODES) / f"node{node}/cpulist").read_text())
        )
    except (OSError, ValueError):
        return ()


def parse_list(text: str) -> set[int]:
    """The numbers of a list as the kernel writes it: `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


@functools.cache
def _warn(nodes: tuple[int, ...]) -> None:
    logger.warning(
        "host memory could not be spread over the memory nodes %s (%s): it goes to the node of the "
        "thread that touches it first, and all CPUs read it through that one; start the process "
        "under numactl --interleave, or allow mbind in its container (said once)",
        ", ".join(map(str, nodes)),
        os.strerror(ctypes.get_errno()),
    )
