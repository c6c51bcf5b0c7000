"""CUDA: torch's streams and memory; the driver for what torch does not offer."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from sparsekv.device.accelerator import Accelerator
from sparsekv.device.stream import Event, Stream, TimedEvent
from sparsekv.errors import CacheStateError, CapacityError, LayoutError

_MEMHOSTREGISTER_PORTABLE, _MEMHOSTREGISTER_DEVICEMAP = 1, 2
_STREAM_WAIT_VALUE_GEQ, _STREAM_WRITE_VALUE_DEFAULT = 0, 0
_ADDRESS, _SIZE, _WORD = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
_ARGUMENTS = {
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.c_void_p,),
    "cuMemHostRegister_v2": (_ADDRESS, _SIZE, ctypes.c_uint),
    "cuMemHostUnregister": (_ADDRESS,),
    "cuMemcpyDtoHAsync_v2": (_ADDRESS, ctypes.c_uint64, _SIZE, ctypes.c_void_p),
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, _ADDRESS, _SIZE, ctypes.c_void_p),
    "cuStreamWaitValue32_v2": (ctypes.c_void_p, ctypes.c_uint64, _WORD, ctypes.c_uint),
    "cuStreamWriteValue32_v2": (ctypes.c_void_p, ctypes.c_uint64, _WORD, ctypes.c_uint),
}
"""What the driver's functions take, so that plain numbers can be given."""


_FLAG_FUNCTIONS = ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2")

_flags_work: dict[int, bool] = {}
"""By the index of devices that were tried."""

logger = logging.getLogger(__name__)


class CudaAccelerator(Accelerator):
    """One CUDA device. Registration, copies and flags use the driver, whose failures leave no error
    for the next launch to find.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.init()
        self._driver = ctypes.CDLL("libcuda.so.1")
        for name, types in _ARGUMENTS.items():
            if hasattr(self._driver, name):
                getattr(self._driver, name).argtypes = types
        self._context, self._popped = ctypes.c_void_p(), ctypes.byref(ctypes.c_void_p())
        handle = ctypes.c_int()
        for name, *args in (
            ("cuDeviceGet", ctypes.byref(handle), device.index),
            ("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle),
        ):
            if status := getattr(self._driver, name)(*args):
                raise LayoutError(
                    f"device={device}: {name} failed with error {status}; check nvidia-smi"
                )

    @property
    def has_flags(self) -> bool:
        index = self.device.index
        if index not in _flags_work:
            # Registered as the flags of a cache are: not all memory that is pinned is alike.
            page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            word = torch.frombuffer(page, dtype=torch.int32, count=1)
            try:
                self.register(word.data_ptr(), mmap.PAGESIZE)
            except CapacityError:  # none to try with, nor for the flags of a cache
                return True
            try:
                _flags_work[index] = self._try_flags(word)
            finally:
                self.unregister(word.data_ptr())
        return _flags_work[index]

    def _try_flags(self, word: Tensor) -> bool:
        """Write a flag and wait for it, once: a driver may name what its device does not do."""
        reason = "the driver has no such functions"
        if all(hasattr(self._driver, name) for name in _FLAG_FUNCTIONS):
            stream = self.new_stream()
            try:
                stream.write_flag(word, 1)
                stream.synchronize()
                if int(word) == 1:  # else the wait might not end
                    stream.wait_flag(word, 1)
                    stream.synchronize()
                    return True
                reason = "a flag that was written is not seen"
            except CacheStateError as error:
                reason = str(error)
        logger.warning(
            "%s: streams cannot wait for flags in host memory (%s), so the calling thread waits "
            "for the CPU's part of attention in each layer; a newer driver may help",
            self.device,
            reason,
        )
        return False

    @property
    def has_queue(self) -> bool:
        return True

    def current_stream(self) -> Stream:
        return CudaStream(self, torch.cuda.current_stream(self.device))

    def new_stream(self) -> Stream:
        return CudaStream(self, torch.cuda.Stream(self.device))

    def timed_event(self) -> TimedEvent:
        return _CudaTimedEvent()

    def register(self, address: int, num_bytes: int) -> None:
        status = self.call(
            "cuMemHostRegister_v2",
            address,
            num_bytes,
            _MEMHOSTREGISTER_PORTABLE | _MEMHOSTREGISTER_DEVICEMAP,
        )
        if status:
            raise CapacityError(
                f"registering {num_bytes} bytes of host memory with {self.device}: refused by "
                "the driver (error "
                f"{status}); free host memory, raise the container's limit of it, or lower the "
                "pinned share with a higher cpu_share"
            )

    def unregister(self, address: int) -> None:
        # Kernels may be reading there. At exit the driver may be gone, and the
        # registration with it.
        self.call("cuCtxSynchronize")
        self.call("cuMemHostUnregister", address)

    def call(self, name: str, *args: object) -> int:
        """Call the driver with this device's context, on whatever thread (a finalizer's, say).

        Returns:
            The driver's error code; 0 is success.
        """
        status = self._driver.cuCtxPushCurrent_v2(self._context)
        if status:
            return int(status)
        try:
            return int(getattr(self._driver, name)(*args))
        finally:
            self._driver.cuCtxPopCurrent_v2(self._popped)


class CudaStream(Stream):
    """A stream of torch's, or the caller's."""

    def __init__(self, accelerator: CudaAccelerator, stream: torch.cuda.Stream) -> None:
        super().__init__(accelerator)
        self._call = accelerator.call
        self._stream = stream
        self._handle = stream.cuda_stream
        self._host: ThreadPoolExecutor | None = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        if torch.cuda.current_stream(target.device) == self._stream:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source)
        self._keep(target)
        self._keep(source)

    def record(self) -> Event:
        # Who waits for it sleeps: a core that spins is one less for attention.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def record_time(self, event: TimedEvent) -> None:
        assert isinstance(event, _CudaTimedEvent)
        event.event.record(self._stream)

    def wait(self, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):
            event.wait(self._stream)
        else:
            event.synchronize()

    def synchronize(self) -> None:
        self._stream.synchronize()

    def then(self, function: Callable[[], None]) -> Event:
        event = self.record()

        def run() -> None:
            event.synchronize()
            function()

        if self._host is None:
            self._host = ThreadPoolExecutor(1, thread_name_prefix="sparsekv-host")
        return _HostEvent(self._host.submit(run))

    def write_flag(self, flag: Tensor, value: int) -> None:
        self._enqueue(
            "cuStreamWriteValue32_v2",
            self._handle,
            flag.data_ptr(),
            value % 2**32,
            _STREAM_WRITE_VALUE_DEFAULT,
        )

    def wait_flag(self, flag: Tensor, value: int) -> None:
        self._enqueue(
            "cuStreamWaitValue32_v2",
            self._handle,
            flag.data_ptr(),
            value % 2**32,
            _STREAM_WAIT_VALUE_GEQ,
        )

    def _to_host(self, host: Tensor, source: Tensor) -> None:
        self._enqueue("cuMemcpyDtoHAsync_v2", *_copy_arguments(host, source), self._handle)
        self._keep(source)

    def _from_host(self, target: Tensor, host: Tensor) -> None:
        self._enqueue("cuMemcpyHtoDAsync_v2", *_copy_arguments(target, host), self._handle)
        self._keep(target)

    def _keep(self, tensor: Tensor) -> None:
        """Let torch not use this memory again, once it is free, before this stream is done."""
        tensor.record_stream(self._stream)

    def _enqueue(self, name: str, *args: object) -> None:
        if status := self._call(name, *args):
            raise CacheStateError(
                f"{name} on {self._accelerator.device} failed with error {status}: the device is "
                "out of order, or the host memory is not registered as one piece; restart the "
                "process if other CUDA calls fail too"
            )


class _CudaTimedEvent:
    """An event of torch's, which makes the driver's when it is first recorded."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)

    def has_come(self) -> bool:
        return bool(self.event.query())

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, _CudaTimedEvent)
        return 1e-3 * float(earlier.event.elapsed_time(self.event))


class _HostEvent:
    """The end of a function that runs on the host."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def synchronize(self) -> None:
        self._future.result()


def _copy_arguments(target: Tensor, source: Tensor) -> tuple[int, int, int]:
    return target.data_ptr(), source.data_ptr(), source.numel() * source.element_size()
