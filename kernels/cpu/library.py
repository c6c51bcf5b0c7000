"""The native library: found in the package or built, at first use, once in a process.

A library is used only beside the very sources it was built from: in a tree where they change, what
was packaged before is passed over.

`SPARSEKV_CPU` says what to use: `auto` (the default) the library if there is one, else torch's ops,
with one warning; `native` the library or an error; `torch` torch's ops.
"""

import ctypes
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsekv.errors import LayoutError
from sparsekv.kernels.cpu.build import (
    PACKAGED_NAME,
    SOURCES,
    BuildError,
    built_library,
    fingerprint,
)

logger = logging.getLogger(__name__)

_INTERFACE = 6  # SPARSEKV_INTERFACE of api.h
_CHOICES = ("auto", "native", "torch")
_REMEDY = "remove it, or install sparsekv again"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of keys and values, in api.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What computes attention on the CPU.

    Attributes:
        name: "native", or "torch" for torch's ops.
        isa: instruction set in use: "amx", "avx512", "avx2" or "portable", or for tests
            "amx_emulated"; None for torch's ops.
        num_threads: threads that compute.
        library: path of the native library; None for torch's ops.
        is_packaged: whether the library came with the package; False where this machine built it.
        reason: why it is not what would have come first: the packaged library, then a built one,
            then torch's ops. Empty for the first.
        remedy: what would bring that back; empty where nothing is amiss.
    """

    name: str
    isa: str | None
    num_threads: int
    library: Path | None
    is_packaged: bool
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """Outcome of the one attempt to load: a library, or why there is none."""

    functions: Any = None  # a ctypes.CDLL, whose functions are found by name
    path: Path | None = None
    is_packaged: bool = False
    reason: str = ""
    remedy: str = ""


_loaded: _Loaded | None = None
_loading = threading.Lock()


def _forget_lock_in_child() -> None:
    """A thread that holds the lock does not exist in the child, where nobody would release it."""
    global _loading
    _loading = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock_in_child)


def native_library() -> Any:
    """The loaded library (a ctypes.CDLL); None where torch's ops are to be used.

    Raises:
        LayoutError: `SPARSEKV_CPU` is none of its values, or `native` and there is no library.
    """
    return _load().functions


def backend() -> Backend:
    """Which implementation is in use, and how; loads or builds the library if nobody has yet.

    Raises:
        LayoutError: as native_library.
    """
    loaded = _load()
    if loaded.functions is None:
        return Backend(
            name="torch",
            isa=None,
            num_threads=torch.get_num_threads(),
            library=None,
            is_packaged=False,
            reason=loaded.reason,
            remedy=loaded.remedy,
        )
    return Backend(
        name="native",
        isa=loaded.functions.sparsekv_isa().decode(),
        num_threads=loaded.functions.sparsekv_threads(),
        library=loaded.path,
        is_packaged=loaded.is_packaged,
        reason=loaded.reason,
        remedy=loaded.remedy,
    )


def set_isa(name: str | None) -> None:
    """Use the named instruction set from now on, in the whole process; None: the best there is.

    Raises:
        LayoutError: there is no library, no such set, or this processor lacks it.
    """
    encoded = None if name is None else name.encode()
    if _required().sparsekv_set_isa(encoded) != 0:
        raise LayoutError(
            f"isa={name!r}: must be amx, avx512, avx2 or portable, and one that this processor "
            "has, or amx_emulated; None chooses the best"
        )


def kernel_for(*, num_heads: int, num_kv_heads: int, num_queries: int, dtype: torch.dtype) -> str:
    """Name of the kernel that computes such a call in the instruction set in use.

    It is that of the set, but for "amx": its matrices take only keys and values of bfloat16 and at
    least 4 query rows for each kv head (num_queries * num_heads / num_kv_heads), and "avx512"
    computes all else. "amx_emulated" has "portable" for that.

    Raises:
        LayoutError: there is no library, or it takes no such shape or dtype.
    """
    if dtype not in DTYPES or num_kv_heads < 1:
        raise LayoutError(
            f"dtype={dtype}, num_kv_heads={num_kv_heads}: must be one of "
            f"{', '.join(map(str, DTYPES))} and at least 1; convert the keys"
        )
    name: bytes = _required().sparsekv_kernel(num_heads, num_kv_heads, num_queries, DTYPES[dtype])
    return name.decode()


def set_num_threads(num_threads: int | None) -> None:
    """Compute with so many threads from now on, in the whole process.

    None: physical cores that the process may use, within its cgroup's limit, less one; at least 1.
    Threads are pinned, each to a core of those that the calling thread may use; not if there are
    more threads than cores. Jobs that wait go on waiting; returns after those that run have ended.

    Raises:
        LayoutError: there is no library, or the number is not within 1 and 4096.
    """
    if num_threads is not None and not 1 <= num_threads <= 4096:
        raise LayoutError(f"num_threads={num_threads}: must be within 1 and 4096, or None")
    _required().sparsekv_set_threads(num_threads or 0)


def _required() -> Any:
    loaded = _load()
    if loaded.functions is None:
        raise LayoutError(
            f"no native library is in use: {loaded.reason}; there is nothing to set for torch's ops"
        )
    return loaded.functions


def _load() -> _Loaded:
    global _loaded
    with _loading:
        if _loaded is None:
            _loaded = _load_as_chosen(os.environ.get("SPARSEKV_CPU", "auto"))
        return _loaded


def _load_as_chosen(choice: str) -> _Loaded:
    if choice not in _CHOICES:
        raise LayoutError(f"SPARSEKV_CPU={choice!r}: must be one of {', '.join(_CHOICES)}")
    if choice == "torch":
        return _Loaded(reason="SPARSEKV_CPU=torch", remedy="unset SPARSEKV_CPU")
    try:
        return _load_library()
    except BuildError as error:
        if choice == "native":
            raise LayoutError(
                f"SPARSEKV_CPU=native, but there is no native library: {error}; install a C++17 "
                "compiler, or set SPARSEKV_CPU=auto to use torch's ops"
            ) from error
        logger.warning("Attention on the CPU uses torch's ops, at lower speed: %s", error)
        return _Loaded(reason=str(error), remedy=error.remedy)


def _load_library() -> _Loaded:
    """The packaged library, or else one that is built.

    Raises:
        BuildError: there is neither.
    """
    try:
        path = _packaged_library()
        return _Loaded(functions=_open(path), path=path, is_packaged=True)
    except BuildError as error:
        reason, remedy = str(error), error.remedy
    try:
        path = built_library()
        return _Loaded(functions=_open(path), path=path, reason=reason, remedy=remedy)
    except BuildError as error:
        raise BuildError(f"{reason}, and none can be built: {error}", error.remedy) from error


def _packaged_library() -> Path:
    """The library that was built when the package was installed."""
    for path in sorted(SOURCES.glob(f"{PACKAGED_NAME}*.so")):
        return path
    raise BuildError("the package holds no library")


def _open(path: Path) -> Any:
    try:
        functions = ctypes.CDLL(str(path))
        interface = functions.sparsekv_interface()
        functions.sparsekv_fingerprint.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}", _REMEDY) from error
    if interface != _INTERFACE:
        raise BuildError(
            f"{path} has interface {interface}, this version needs {_INTERFACE}", _REMEDY
        )
    if functions.sparsekv_fingerprint() != fingerprint().encode():
        raise BuildError(f"{path} was built from other sources", _REMEDY)
    functions.sparsekv_isa.restype = ctypes.c_char_p
    functions.sparsekv_kernel.restype = ctypes.c_char_p
    functions.sparsekv_kernel.argtypes = (*(ctypes.c_int64,) * 3, ctypes.c_int32)
    functions.sparsekv_set_isa.argtypes = (ctypes.c_char_p,)
    functions.sparsekv_set_threads.argtypes = (ctypes.c_int32,)
    functions.sparsekv_partial_attention.argtypes = (ctypes.c_void_p,)
    functions.sparsekv_gather_blocks.argtypes = (ctypes.c_void_p,)
    signal_and_job = (ctypes.c_void_p, ctypes.c_void_p)
    for submit in ("sparsekv_submit_partial_attention", "sparsekv_submit_gather_blocks"):
        calls = (ctypes.c_void_p, ctypes.c_int64)
        getattr(functions, submit).argtypes = (*calls, *signal_and_job)
    wait = (ctypes.c_int64, ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p)
    functions.sparsekv_job_wait.argtypes = wait
    functions.sparsekv_job_cancel.argtypes = (ctypes.c_int64,)
    functions.sparsekv_job_release.argtypes = (ctypes.c_int64,)
    functions.sparsekv_cancel_jobs.restype = None
    functions.sparsekv_store_flag.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
    functions.sparsekv_store_flag.restype = None
    functions.sparsekv_load_flag.argtypes = (ctypes.c_void_p,)
    functions.sparsekv_load_flag.restype = ctypes.c_uint32
    return functions
