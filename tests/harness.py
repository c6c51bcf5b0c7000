"""What the cache tests share: a dense twin, reading back through row tables, injected faults."""

import contextlib
import functools
import linecache
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import sparsekv
import sparsekv.cache as cache_module
from sparsekv.cache import InplaceKVCache
from sparsekv.device import SimulatedAccelerator, SimulatedStream
from sparsekv.format import KVGeometry, PartitionSpec
from sparsekv.roofline import ShareRouter

PACKAGE = str(Path(sparsekv.__file__).parent)


def geometry(**changes):
    fields = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "dtype": torch.float32}
    return KVGeometry(**{**fields, **changes})


def spec(geometry_=None, **changes):
    """Segments of 4 tokens."""
    fields = {"batch_size": 2, "max_tokens": None, "block_size": 2, "window_size": 4}
    fields["ping_pong_tokens"] = 2 * changes.get("window_size", 4)
    return PartitionSpec(geometry=geometry_ or geometry(), **{**fields, **changes})


def build(spec_=None, share=0.5, device="cpu", **options):
    return InplaceKVCache(spec_ or spec(), device, ShareRouter(share), **options)


def new_tokens(cache, num_tokens, batch_size=None):
    """Random keys and values of one layer, where the cache wants them."""
    kv = cache.spec.geometry
    batch_size = cache.batch_size if batch_size is None else batch_size
    shape = (batch_size, kv.num_kv_heads, num_tokens)
    key = torch.randn(*shape, kv.head_dim, device=cache.device).to(kv.dtype)
    if kv.shared_kv:
        return key, None
    return key, torch.randn(*shape, kv.value_dim, device=cache.device).to(kv.dtype)


def value_of(cache, key, value):
    """The values that go with these keys: themselves, or the first columns of shared ones."""
    return key[..., : cache.spec.geometry.value_dim] if value is None else value


def read(cache, layer_idx):
    """(key, value) of a layer, dense on the CPU, gathered from its views through the row tables.

    Checks on the way that each token is in exactly one region, the one that region_of names.
    """
    views, kv, batch = cache.views(layer_idx), cache.spec.geometry, cache.batch_size
    assert views.num_tokens == cache.layer_num_tokens(layer_idx)
    key = torch.full((batch, kv.num_kv_heads, views.num_tokens, kv.head_dim), torch.nan)
    value = torch.full((batch, kv.num_kv_heads, views.num_tokens, kv.value_dim), torch.nan)
    key, value = key.to(kv.dtype), value.to(kv.dtype)
    homes = [[] for _ in range(views.num_tokens)]
    for name in ("window", "unpinned", "pinned"):
        for part in getattr(views, name):
            assert part.batch_size == batch
            assert part.positions.shape == (part.key.shape[0],)
            assert part.key.device == (cache.device if name == "window" else torch.device("cpu"))
            for i, start in enumerate(part.positions.tolist()):
                rows = torch.arange(batch) if part.row_table is None else part.row_table[i]
                stop = start + part.key.shape[3]
                key[:, :, start:stop] = part.key[i].cpu()[rows]
                value[:, :, start:stop] = part.value[i].cpu()[rows]
                for token in range(start, stop):
                    homes[token].append(name)
    assert homes == [[cache.region_of(layer_idx, i)] for i in range(views.num_tokens)]
    return key, value


def same_bits(left, right):
    """Equal shape, dtype and bits (a NaN equals itself)."""
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and (
            left.numel() == 0
            or torch.equal(
                left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
            )
        )
    )


class Twin:
    """A cache and the dense keys and values that it must answer with."""

    def __init__(self, cache):
        self.cache = cache
        empty = [new_tokens(cache, 0) for _ in range(cache.spec.geometry.num_layers)]
        self.dense = [[key.cpu(), value_of(cache, key, value).cpu()] for key, value in empty]

    def append(self, num_tokens, layers=None, flush=True):
        for layer_idx in range(len(self.dense)) if layers is None else layers:
            key, value = new_tokens(self.cache, num_tokens)
            self.cache.append(layer_idx, key, value)
            self.note(layer_idx, key, value)
            if flush:
                self.cache.flush(layer_idx)

    def note(self, layer_idx, key, value):
        new = (key, value_of(self.cache, key, value))
        old = self.dense[layer_idx]
        self.dense[layer_idx] = [torch.cat([o, n.cpu()], 2) for o, n in zip(old, new, strict=True)]

    def apply(self, function):
        """Change the dense side: `function` of each tensor (batch, heads, tokens, dim)."""
        self.dense = [[function(tensor) for tensor in layer] for layer in self.dense]

    def check(self):
        for layer_idx, (key, value) in enumerate(self.dense):
            found_key, found_value = read(self.cache, layer_idx)
            assert same_bits(found_key, key), f"keys of layer {layer_idx} differ"
            assert same_bits(found_value, value), f"values of layer {layer_idx} differ"


def regions(cache, layer_idx=0):
    return [cache.region_of(layer_idx, i) for i in range(cache.layer_num_tokens(layer_idx))]


def placed_segments(cache, layer_idx=0):
    """{position: (region, address of the segment, its bytes)} of the segments in host memory."""
    views, found = cache.views(layer_idx), {}
    for name in ("unpinned", "pinned"):
        for part in getattr(views, name):
            for i, start in enumerate(part.positions.tolist()):
                found[start] = (
                    name,
                    part.key[i].data_ptr(),
                    part.key[i].clone(),
                    part.value[i].clone(),
                )
    return found


def assert_not_moved(before, after):
    """Each segment of `before` is in `after`, at the same place with the same bytes."""
    for start, (name, address, key, value) in before.items():
        now = after[start]
        assert now[:2] == (name, address), f"the segment at {start} moved"
        assert same_bits(now[2], key)
        assert same_bits(now[3], value)


def mappings(cache):
    leases = [s.leases for layer in cache._layers for s in layer.stacks.values()]
    return [lease.mapping for held in leases for lease in held]


class FaultyAccelerator(SimulatedAccelerator):
    """A simulated accelerator with poisoned memory, whose n-th operation from now raises.

    Operations of streams fail when they are enqueued, as a driver refuses them.
    """

    def __init__(self, stream_type=SimulatedStream):
        super().__init__()
        self.countdown = None
        self.error = None
        self.num_operations = 0
        self._stream_type = _faulty(stream_type)

    def fail(self, countdown, error):
        self.countdown, self.error, self.num_operations = countdown, error, 0

    def tick(self):
        self.num_operations += 1
        if self.countdown is not None and self.num_operations == self.countdown:
            raise self.error

    def new_stream(self):
        return self._stream_type(self)

    def current_stream(self):
        return _faulty(SimulatedStream)(self)

    def empty(self, shape, dtype):
        self.tick()
        return super().empty(shape, dtype).fill_(torch.nan)

    def copy_to_host(self, host, source):
        self.tick()
        super().copy_to_host(host, source)

    def copy_from_host(self, target, host):
        self.tick()
        super().copy_from_host(target, host)

    def register(self, address, num_bytes):
        self.tick()
        super().register(address, num_bytes)


@functools.cache
def _faulty(stream_type):
    class FaultyStream(stream_type):
        def copy(self, target, source):
            half = source.shape[0] // 2  # a copy may fail half-way
            super().copy(target[:half], source[:half])
            self._accelerator.tick()
            super().copy(target, source)

        def record(self):
            self._accelerator.tick()
            return super().record()

        def then(self, function):
            self._accelerator.tick()
            return super().then(function)

    return FaultyStream


@contextlib.contextmanager
def accelerators(make):
    """Caches made meanwhile get their accelerator from `make`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "open_accelerator", lambda device: make())
        yield


def build_faulty(spec_=None, share=0.5, stream_type=SimulatedStream):
    with accelerators(lambda: FaultyAccelerator(stream_type)):
        return build(spec_, share)


_HANGS_S = 20.0
"""What works as long on what a step leaves behind will not come to an end at all."""


def _synchronize():
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def seconds_to_synchronize(wait=_synchronize):
    """How long it takes until `wait` returns, which waits for CUDA's devices, if there are any, or
    for a stream; fails instead of hanging.
    """
    start = time.perf_counter()
    done = threading.Thread(target=wait, daemon=True)
    done.start()
    done.join(_HANGS_S)
    assert not done.is_alive(), "the device waits for something that never comes"
    return time.perf_counter() - start


_TAKING_A_LOCK = ("with self._lock", "with _loading")


class _Interrupt:
    """Raises KeyboardInterrupt before the n-th line that the package's own code runs."""

    def __init__(self, at_line):
        self.at_line = at_line
        self.num_lines = 0

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or _is_finalizing(frame):
            return None
        # Python itself sees to it that a lock once taken is released; a tracer would not.
        if event == "line" and not linecache.getline(
            code.co_filename, frame.f_lineno
        ).lstrip().startswith(_TAKING_A_LOCK):
            self.num_lines += 1
            if self.num_lines == self.at_line:
                raise KeyboardInterrupt
        return self


def _is_finalizing(frame):
    """A finalizer may run at any line; what Python raises there nobody sees."""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == weakref.__file__


def interrupt(at_line, function, kept=None):
    """Call `function`, interrupted at a line. False once it has fewer lines, and so was done.

    `kept`: a list that keeps the error, as a debugger does, and with it whatever was in its frames.
    """
    tracer, old = _Interrupt(at_line), sys.gettrace()
    sys.settrace(tracer)
    try:
        function()
    except KeyboardInterrupt as error:
        if kept is not None:
            kept[:] = [error]
        return True
    finally:
        sys.settrace(old)
    return False
