"""Streams order what is enqueued on them, however slow they are; events order streams."""

import gc
import threading
import time

import pytest
import torch
from simulated_streams import ACCELERATORS, LateAccelerator, LateCaller
from test_regions import CheckedAccelerator, mapped

from sparsekv.device import open_accelerator
from sparsekv.regions import Registrar

_SLEEP_CYCLES = 20_000_000  # about 10 ms


def cuda():
    return open_accelerator("cuda")


KINDS = [
    *(pytest.param(kind, id=name) for name, kind in ACCELERATORS.items()),
    pytest.param(
        cuda,
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


@pytest.fixture(params=KINDS)
def accelerator(request):
    return request.param()


def host_buffer(accelerator, shape, dtype):
    return Registrar(accelerator).buffer(shape, dtype)


def delay(accelerator):
    """Keep the caller's stream busy, where it can be."""
    if accelerator.device.type == "cuda":
        torch.cuda._sleep(_SLEEP_CYCLES)


def numbers(accelerator, *shape):
    """Accelerator memory 0, 1, 2, ..., written late on the caller's stream."""
    tensor = accelerator.empty(shape, torch.float32)
    delay(accelerator)
    tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view(shape))
    return tensor


def after_caller(accelerator):
    """A side stream that begins when the caller's work so far is done."""
    stream = accelerator.new_stream()
    stream.wait(accelerator.current_stream().record())
    return stream


def test_copies_are_bitwise_in_order_and_counted(accelerator):
    source = numbers(accelerator, 3, 5)
    host = host_buffer(accelerator, (3, 5), torch.float32)
    back = accelerator.empty((3, 5), torch.float32)
    stream = after_caller(accelerator)
    stream.copy_to_host(host, source)
    stream.copy_from_host(back, host)
    stream.copy(back[:, 0], back[:, 4])
    stream.synchronize()
    expected = torch.arange(15.0).view(3, 5)
    assert torch.equal(host, expected)
    expected[:, 0] = expected[:, 4]
    assert torch.equal(back.cpu(), expected)
    assert (accelerator.d2h_bytes, accelerator.h2d_bytes) == (60, 60)


def test_slots_with_gaps_are_copied_one_by_one(accelerator):
    source = numbers(accelerator, 3, 2, 2)
    whole = host_buffer(accelerator, (3, 6), torch.float32)
    slots = whole[:, :4].unflatten(1, (2, 2))
    back = accelerator.empty((3, 2, 2), torch.float32)
    stream = after_caller(accelerator)
    stream.copy_to_host(slots, source)
    stream.copy_from_host(back, slots)
    stream.copy_to_host(slots[:0], source[:0])
    stream.synchronize()
    assert torch.equal(back.cpu(), source.cpu())
    assert whole[:, 4:].eq(0).all()
    with pytest.raises(AssertionError, match="strides"):
        stream.copy_to_host(slots.transpose(1, 2), source)


def test_what_an_event_follows_is_done_when_it_has_come(accelerator):
    source = numbers(accelerator, 1000)
    host = host_buffer(accelerator, (1000,), torch.float32)
    stream = after_caller(accelerator)
    stream.copy_to_host(host[:500], source[:500])
    event = stream.record()
    stream.copy_to_host(host[500:], source[500:])
    event.synchronize()
    assert torch.equal(host[:500], torch.arange(500.0))
    stream.synchronize()
    assert torch.equal(host, torch.arange(1000.0))


def test_timed_events_tell_the_time_between_them_again_and_again(accelerator):
    host = host_buffer(accelerator, (1000,), torch.float32)
    begin, end = accelerator.timed_event(), accelerator.timed_event()
    stream, source = after_caller(accelerator), numbers(accelerator, 1000)
    stream.synchronize()
    for _ in range(2):
        start = time.perf_counter()
        stream.record_time(begin)
        stream.copy_to_host(host, source)
        stream.record_time(end)
        if isinstance(accelerator, LateAccelerator):
            assert not begin.has_come()
            assert not end.has_come()
        stream.synchronize()
        assert begin.has_come()
        assert end.has_come()
        assert 0 < end.seconds_since(begin) <= time.perf_counter() - start


def test_an_event_orders_two_streams(accelerator):
    source = numbers(accelerator, 8, 4096)
    host = host_buffer(accelerator, (8, 4096), torch.float32)
    back = accelerator.empty((8, 4096), torch.float32)
    out, into = after_caller(accelerator), after_caller(accelerator)
    for i in range(8):  # each piece goes there and back
        out.copy_to_host(host[i], source[i])
        into.wait(out.record())
        into.copy_from_host(back[i], host[i])
    into.synchronize()
    assert torch.equal(back.cpu(), source.cpu())


def test_the_caller_may_wait_for_a_side_stream(accelerator):
    host = host_buffer(accelerator, (100,), torch.float32)
    host.copy_(torch.arange(100.0))
    target = accelerator.empty((100,), torch.float32)
    stream = after_caller(accelerator)
    stream.copy_from_host(target, host)
    accelerator.current_stream().wait(stream.record())
    assert torch.equal((target + 1).cpu(), torch.arange(100.0) + 1)


def test_functions_are_called_in_turn_after_the_work_before_them(accelerator):
    source = numbers(accelerator, 10)
    host = host_buffer(accelerator, (10,), torch.float32)
    stream, seen = after_caller(accelerator), []
    for i in range(10):
        stream.copy_to_host(host[i : i + 1], source[i : i + 1])
        last = stream.then(lambda i=i: seen.append((i, host[i].item())))
    last.synchronize()
    assert seen == [(i, float(i)) for i in range(10)]
    stream.then(lambda: seen.append("more")).synchronize()
    assert seen[10:] == ["more"]


def test_a_stream_goes_on_while_a_function_runs():
    for kind in (ACCELERATORS["late"], ACCELERATORS["delayed"]):
        _assert_goes_on(kind())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_stream_goes_on_while_a_function_runs():
    _assert_goes_on(cuda())


def _assert_goes_on(accelerator):
    stream, gate = accelerator.new_stream(), threading.Event()
    end = stream.then(gate.wait)
    host = host_buffer(accelerator, (4,), torch.float32)
    stream.copy_to_host(host, numbers(accelerator, 4))
    stream.record().synchronize()
    assert not gate.is_set()
    gate.set()
    end.synchronize()


def test_a_stream_stands_still_until_its_flag_is_set(accelerator):
    """Not late ones: nobody would be there to set it while they make up for lost time."""
    if isinstance(accelerator, LateAccelerator):
        return
    flag = host_buffer(accelerator, (2,), torch.int32)
    host = host_buffer(accelerator, (1000,), torch.float32)
    source = numbers(accelerator, 1000)
    first, second = after_caller(accelerator), after_caller(accelerator)
    flag[0] = 2**31 - 1
    first.copy_to_host(host[:500], source[:500])
    first.write_flag(flag[0], -(2**31))  # one more than the largest: counters wrap around
    second.wait_flag(flag[0], -(2**31))
    second.write_flag(flag[1], 7)
    second.synchronize()
    assert torch.equal(host[:500], torch.arange(500.0))
    assert flag.tolist() == [-(2**31), 7]
    second.wait_flag(flag[1], 6)
    second.copy_to_host(host[500:], source[500:])
    second.synchronize()
    assert torch.equal(host, torch.arange(1000.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_host_sets_a_flag_that_a_cuda_stream_waits_for():
    accelerator = cuda()
    flag = host_buffer(accelerator, (1,), torch.int32)
    source, host = numbers(accelerator, 9), host_buffer(accelerator, (9,), torch.float32)
    stream = after_caller(accelerator)
    stream.wait_flag(flag, 1)
    stream.copy_to_host(host, source)
    event = stream.record()
    torch.cuda.current_stream().synchronize()
    assert not event.query()
    assert host.eq(0).all()
    flag.fill_(1)
    event.synchronize()
    assert torch.equal(host, torch.arange(9.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_current_stream_is_the_one_the_caller_chose():
    accelerator, chosen = cuda(), torch.cuda.Stream()
    host = host_buffer(accelerator, (1 << 20,), torch.float32)
    with torch.cuda.stream(chosen):
        source = numbers(accelerator, 1 << 20)
        stream = after_caller(accelerator)
        stream.copy_to_host(host, source)
    stream.synchronize()
    assert torch.equal(host, torch.arange(float(1 << 20)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["to host", "within"])
def test_memory_let_go_of_is_not_used_again_before_a_copy_has_read_it(kind):
    accelerator = cuda()
    # While no stream stands still yet, for either may wait for all of them: what CUDA loads at a
    # first use, and the memory of all that follows.
    spare = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(6)]
    del spare
    flag = host_buffer(accelerator, (1,), torch.int32)
    host = host_buffer(accelerator, (1 << 20,), torch.float32)
    kept = accelerator.empty((1 << 20,), torch.float32)
    source = numbers(accelerator, 1 << 20)
    stream = after_caller(accelerator)
    stream.wait_flag(flag, 1)
    if kind == "within":
        stream.copy(kept, source)
    stream.copy_to_host(host, kept if kind == "within" else source)
    del source
    others = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(4)]
    torch.cuda.current_stream().synchronize()
    flag.fill_(1)
    stream.synchronize()
    assert torch.equal(host, torch.arange(float(1 << 20)))
    assert len(others) == 4


@pytest.mark.parametrize("name", ["late", "delayed"])
def test_the_slow_streams_of_these_tests_are_slow(name):
    """Without waiting, some of what a side stream copies is not there yet."""
    accelerator = ACCELERATORS[name]()
    stream, host = accelerator.new_stream(), host_buffer(accelerator, (50,), torch.float32)
    for i in range(50):
        stream.copy_to_host(host[i : i + 1], torch.ones(1))
    assert host.sum() < 50
    stream.synchronize()
    assert host.sum() == 50


def test_a_late_caller_reads_what_lies_there_when_somebody_waits():
    accelerator = LateCaller()
    source, host = torch.zeros(3), host_buffer(accelerator, (3,), torch.float32)
    accelerator.current_stream().copy_to_host(host, source)
    source += 1
    accelerator.new_stream().wait(accelerator.current_stream().record())
    assert host.tolist() == [1, 1, 1]


# Host buffers


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), torch.int32), ((3, 5), torch.bfloat16), ((3 << 20,), torch.float32)]
)
def test_a_host_buffer_is_registered_as_long_as_a_tensor_on_it_lives(shape, dtype):
    accelerator = CheckedAccelerator()
    buffer = host_buffer(accelerator, shape, dtype)
    assert (buffer.shape, buffer.dtype) == (torch.Size(shape), dtype)
    assert buffer.eq(0).all()
    ((address, num_bytes),) = accelerator.registered.items()
    assert address == buffer.data_ptr()
    assert num_bytes >= buffer.numel() * dtype.itemsize
    last = buffer.reshape(-1)[-1:]
    del buffer
    gc.collect()
    assert last.eq(0).all()
    assert mapped(address)
    del last
    gc.collect()
    assert accelerator.registered == {}
    assert not mapped(address)


def test_a_refused_host_buffer_leaves_nothing_behind_and_is_asked_for_once(caplog):
    accelerator = CheckedAccelerator(limit=1)
    registrar, asked = Registrar(accelerator), []
    real = accelerator.register
    accelerator.register = lambda address, num_bytes: (
        asked.append(num_bytes),
        real(address, num_bytes),
    )
    kept = registrar.buffer((4,), torch.int32)
    for _ in range(3):
        assert registrar.buffer((4,), torch.int32) is None
    assert registrar.buffer((5,), torch.int32) is None
    assert len(asked) == 2
    assert list(accelerator.registered) == [kept.data_ptr()]
    assert len(caplog.records) == 1
    assert not registrar.is_refused, "a segment may still be smaller"
    accelerator.limit = 2
    registrar.retry()
    assert registrar.buffer((4,), torch.int32) is not None
    assert len(caplog.records) == 1


def test_buffers_are_counted_as_long_as_they_live():
    registrar = Registrar(CheckedAccelerator())
    kept = registrar.buffer((5000,), torch.float32)
    for _ in range(3):
        registrar.buffer((10,), torch.int32)
    gc.collect()
    assert registrar.buffer_bytes == sum(registrar.accelerator.registered.values()) == 5 * 4096
    del kept
    gc.collect()
    assert registrar.buffer_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_host_buffers_are_pinned_and_a_thousand_of_them_leave_nothing():
    accelerator = cuda()
    for _ in range(1000):
        buffer = host_buffer(accelerator, (1000,), torch.float32)
    assert buffer.is_pinned()
