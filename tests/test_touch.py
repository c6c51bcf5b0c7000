"""Committing pages in threads, and spreading them over memory nodes."""

import ctypes
import errno
import gc
import itertools
import logging
import os
import threading
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.regions import numa, touch
from sparsekv.regions.memory import PAGE_BYTES, Mapping
from sparsekv.regions.touch import Touch, num_threads, pieces

MIB = 1 << 20


@given(st.integers(1, 1 << 40), st.integers(1, 64 * MIB // PAGE_BYTES), st.integers(1, 20))
def test_pieces_cover_everything_once_and_end_between_huge_pages(page, num_pages, count):
    first, last = page * PAGE_BYTES, (page + num_pages) * PAGE_BYTES
    found = pieces(first, last, count)
    assert found[0][0] == first
    assert found[-1][1] == last
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert all(start < end for start, end in found)
    assert all(end % (2 * MIB) == 0 for _, end in found[:-1])
    assert len(found) <= count


def test_threads_are_as_many_as_pay_and_as_there_are_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [num_threads(n * MIB) for n in (0, 1, 32, 33, 128, 10_000)] == [1, 1, 1, 2, 4, 8]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(200)))
    assert num_threads(1 << 40) == 16


@pytest.mark.parametrize("kernel", ["new", "old"])
@pytest.mark.parametrize("num_bytes", [PAGE_BYTES, 3 * MIB, 70 * MIB + PAGE_BYTES])
def test_every_page_is_there_and_zero(monkeypatch, kernel, num_bytes):
    real, refused = touch._libc.madvise, []

    def madvise(address, size, advice):
        if kernel == "old" and advice == 23:
            refused.append(size)
            ctypes.set_errno(errno.EINVAL)
            return -1
        return real(address, size, advice)

    monkeypatch.setattr(touch._libc, "madvise", madvise)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    mapping = Mapping(num_bytes + PAGE_BYTES, (64, "cpu"))
    started = mapping.touch(num_bytes, None)
    started.wait()
    assert started.is_done
    assert mapping.resident_bytes() == num_bytes
    assert (kernel == "new") == (not refused)
    assert mapping.touch(num_bytes - PAGE_BYTES, None) is started, "once is enough"
    mapping.unmap()


def test_addresses_stay_mapped_until_the_last_thread_is_done(monkeypatch):
    go_on, commit = threading.Event(), touch._commit
    monkeypatch.setattr(touch, "_commit", lambda *args: (go_on.wait(10), commit(*args)))

    class Owner:
        pass

    owner, mapping = Owner(), Mapping(4 * MIB, (64, "cpu"))
    alive = weakref.ref(owner)
    started = Touch(mapping.address, 0, 4 * MIB, owner)
    del owner
    assert not started.is_done
    assert alive() is not None
    go_on.set()
    started.wait()
    gc.collect()
    assert alive() is None
    assert mapping.resident_bytes() == 4 * MIB
    mapping.unmap()


def test_without_threads_pages_are_committed_all_the_same(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    mapping = Mapping(4 * MIB, (64, "cpu"))
    assert mapping.touch(4 * MIB, None).is_done
    assert mapping.resident_bytes() == 4 * MIB
    mapping.unmap()


# Memory nodes


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    """A machine with CPUs 0-3 on node 0 and 4-7 on node 2; node 1 has no memory."""
    for node, cpus in ((0, "0-3"), (1, ""), (2, "4-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(f"{cpus}\n")
    (tmp_path / "has_memory").write_text("0,2\n")
    monkeypatch.setattr(numa, "_NODES", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    numa.nodes_in_use.cache_clear()
    numa._warn.cache_clear()
    yield tmp_path
    numa.nodes_in_use.cache_clear()
    numa._warn.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    made = []

    class Libc:
        status = 0

        def syscall(self, number, address, size, mode, mask, bits, flags):
            found = [i for i in range(64) if mask._obj.value >> i & 1]
            made.append((address.value, size.value, mode.value, found, bits.value, flags.value))
            return self.status

    monkeypatch.setattr(numa, "_libc", Libc())
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    return made


def test_a_mapping_is_spread_over_the_nodes_of_this_process(nodes, calls, monkeypatch):
    mapping = Mapping(4 * MIB, (64, None))
    assert calls == [(mapping._base, mapping._mapped_bytes, 3, [0, 2], 65, 0)]
    mapping.unmap()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2})
    numa.nodes_in_use.cache_clear()
    assert numa.nodes_in_use() == (0,)
    Mapping(4 * MIB, (64, None)).unmap()
    assert len(calls) == 1, "one node: nothing to spread"


def test_where_it_is_refused_it_is_said_once(nodes, calls, monkeypatch, caplog):
    numa._libc.status = -1
    for _ in range(3):
        Mapping(PAGE_BYTES, (64, None)).unmap()
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "memory nodes 0, 2" in caplog.text
    assert "numactl --interleave" in caplog.text


def test_machines_that_tell_nothing_have_one_node(nodes):
    (nodes / "has_memory").unlink()
    numa.nodes_in_use.cache_clear()
    assert numa.nodes_in_use() == ()


def test_the_kernel_takes_the_call():
    """On one node the policy changes nothing, but its arguments are checked all the same."""
    mapping = Mapping(4 * MIB, (64, None))
    mask = ctypes.c_ulong(1)
    status = numa._libc.syscall(
        ctypes.c_long(numa._SYS_MBIND[os.uname().machine]),
        ctypes.c_void_p(mapping._base),
        ctypes.c_ulong(mapping._mapped_bytes),
        ctypes.c_long(3),
        ctypes.byref(mask),
        ctypes.c_ulong(65),
        ctypes.c_ulong(0),
    )
    assert status == 0 or ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)
    mapping.unmap()


def test_lists_are_read_as_the_kernel_writes_them():
    assert numa.parse_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numa.parse_list("\n") == set()
