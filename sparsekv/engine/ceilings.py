"""What this machine can do at most, measured with the kernels and the transfers of a decode step.

Nothing is kept: memory is given back, registrations first, also where Ctrl-C strikes half-way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor

from sparsekv.checks import check_positive_int
from sparsekv.device import Accelerator, open_accelerator
from sparsekv.engine.attention_load import SEGMENT_TOKENS, AttentionLoad, random_numbers
from sparsekv.engine.medians import median_seconds, rate, seconds_of
from sparsekv.engine.profile_key import cpu_name
from sparsekv.errors import CapacityError, LayoutError
from sparsekv.format import KVGeometry
from sparsekv.kernels.dispatch import (
    BlockLists,
    decode_ops_for,
    gather_blocks_for,
    num_attending_threads,
)
from sparsekv.regions.host_buffer import buffer_mapping, buffer_on
from sparsekv.regions.memory import Mapping, check_available, total_bytes
from sparsekv.roofline import CostModel, MachineProfile, flops_per_byte

HOST_BYTES = 512 << 20
"""Of ordinary and of registered memory each; calls read them in turn, 1 GiB, so that processors
find little of it in their caches.
"""
DEVICE_BYTES = 128 << 20
"""Of the accelerator's memory, twice."""
CHUNK_BYTES = 16 << 20
"""Of one copy to or from host memory."""
BATCH_SIZE = 16
"""Of the attention that memory limits."""
PRODUCTS_S = 0.01
MOST_SEGMENTS = 1 << 14
"""Of a call that products limit: as many as take `PRODUCTS_S`, and no more than these."""

_HBM_COPIES = 16
"""So many that the wait for the last of them is short beside them."""
_MOST_COPIES = 256
"""Beside one call of the CPU's: the queue of a stream is not endless."""
_PIECE_TOKENS = 64
"""Tokens of a piece of 16 KiB: keys of 128 numbers."""
_NEAR_PRODUCTS = 0.8
"""The part of what products allow from which on these, and not memory, are taken for the limit."""
_FULL_SPEED = 0.9

_CPU = torch.device("cpu")


def measure_machine(
    geometry: KVGeometry,
    *,
    num_heads: int,
    batch_size: int,
    device: torch.device,
    cost: CostModel,
) -> MachineProfile:
    """Measure this machine's ceilings: a few seconds, and about 1 GiB of host memory.

    Args:
        geometry: what a token stores.
        num_heads: query heads.
        batch_size: sequences of a step.
        device: of the accelerator; "cpu" for the simulated one, whose rates are those of copies in
            memory.
        cost: of one layer of this geometry and batch, measured with both engines at work.
    Returns:
        The profile. Rates that `cost` implies are taken from there.
    Raises:
        LayoutError: heads that cannot share the kv heads, a dtype that attention does not take, no
            kernels for the device, or a rate that cannot be told from the times.
        CapacityError: no memory for it, on the host or on the device, or none may be registered.
    """
    load = _load_of(geometry, num_heads, batch_size)
    accelerator = open_accelerator(device)
    _check_kernels(accelerator)
    per_token = batch_size * geometry.bytes_per_token_per_layer
    attended_gbs = rate("cpu_s_per_token", per_token, cost.cpu_s_per_token) / 1e9
    h2d_gbs = rate("h2d_s_per_token", per_token, cost.h2d_s_per_token) / 1e9
    with _memory(accelerator) as (ordinary, registered):
        cpu_tflops = products_tflops(load)
        ordinary_gbs, registered_gbs = cpu_read_gbs(ordinary, registered)
        limit_gbs = attended_gbs
        if _is_limited_by_products(load, attended_gbs, cpu_tflops):
            copies_per_byte = 2 * h2d_gbs / ordinary_gbs
            busy_gbs = busy_read_gbs(accelerator, ordinary, registered, copies_per_byte)
            limit_gbs = max(attended_gbs, busy_gbs)
        return MachineProfile(
            name=f"{_accelerator_name(accelerator)}, {cpu_name()}, {_num_threads()} threads",
            cpu_read_gbs=limit_gbs,
            cpu_tflops=cpu_tflops,
            cpu_shared_kv_tflops=products_tflops(_shared_kv_load(load)),
            h2d_gbs=h2d_gbs,
            d2h_gbs=d2h_gbs(accelerator, registered),
            direct_read_gbs=direct_read_gbs(accelerator, registered),
            gather_gbs=gather_gbs(ordinary, registered),
            hbm_gbs=hbm_gbs(accelerator),
            ram_bytes=total_bytes(),
            vram_bytes=_vram_bytes(accelerator),
            num_threads=_num_threads(),
            reads_pinned_at_full_speed=registered_gbs >= _FULL_SPEED * ordinary_gbs,
            cpu_overhead_s=cost.cpu_overhead_s,
            gpu_overhead_s=cost.gpu_overhead_s,
        )


# The ceilings


def products_tflops(load: AttentionLoad) -> float:
    """1e12 operations/s of the CPU's attention over keys and values that the caches hold."""
    num_segments = 1
    while True:
        attend = load.in_caches(num_segments)
        # Twice, for a call may be long for other reasons, the first one above all.
        if num_segments >= MOST_SEGMENTS or all(seconds_of(attend) >= PRODUCTS_S for _ in range(2)):
            break
        num_segments *= 2
    (seconds,) = median_seconds(attend)
    return rate("cpu_tflops", num_segments * load.segment_flops, seconds) / 1e12


def cpu_read_gbs(ordinary: Tensor, registered: Tensor) -> tuple[float, float]:
    """GB/s of the CPU's attention over either memory, where nothing but memory limits it."""
    calls = [_memory_load().over(memory, _CPU) for memory in (ordinary, registered)]
    of_ordinary, of_registered = median_seconds(*calls)
    return (
        rate("cpu_read_gbs", ordinary.numel(), of_ordinary) / 1e9,
        rate("cpu_read_gbs", registered.numel(), of_registered) / 1e9,
    )


def busy_read_gbs(
    accelerator: Accelerator, ordinary: Tensor, registered: Tensor, copies_per_byte: float
) -> float:
    """The same over ordinary memory while copies go to the accelerator.

    Args:
        copies_per_byte: bytes to copy for each that is read: so many that the bus stays busy.
    """
    stream = accelerator.current_stream()
    target = _device_memory(accelerator, CHUNK_BYTES)
    wanted = int(copies_per_byte * ordinary.numel()) // CHUNK_BYTES + 1
    chunks = tuple(islice(cycle(registered.split(CHUNK_BYTES)), min(wanted, _MOST_COPIES)))

    def copy() -> None:
        for chunk in chunks:
            stream.copy_from_host(target, chunk)

    attend, evict = (_memory_load().over(memory, _CPU) for memory in (ordinary, registered))
    _, seconds, _, _ = median_seconds(copy, attend, stream.synchronize, evict)
    return rate("cpu_read_gbs", ordinary.numel(), seconds) / 1e9


def d2h_gbs(accelerator: Accelerator, registered: Tensor) -> float:
    """GB/s of copies from the accelerator, while the CPU rests."""
    stream = accelerator.current_stream()
    source = _device_memory(accelerator, CHUNK_BYTES)

    def copy() -> None:
        for chunk in registered.split(CHUNK_BYTES):
            stream.copy_to_host(chunk, source)
        stream.synchronize()

    (seconds,) = median_seconds(copy)
    return rate("d2h_gbs", registered.numel(), seconds) / 1e9


def direct_read_gbs(accelerator: Accelerator, registered: Tensor) -> float:
    """GB/s of the accelerator's attention over memory where it lies, while the CPU rests."""
    stream = accelerator.current_stream()
    attend = _memory_load().over(registered, accelerator.device)

    def read() -> None:
        attend()
        stream.synchronize()

    (seconds,) = median_seconds(read)
    return rate("direct_read_gbs", registered.numel(), seconds) / 1e9


def gather_gbs(ordinary: Tensor, registered: Tensor) -> float:
    """GB/s, in bytes copied, of the CPU's gather of pieces of 16 KiB in random order."""
    load = _memory_load()
    heads = (load.batch_size, load.geometry.num_kv_heads)
    # Keys and values of a head lie end to end: one gather takes pieces of both.
    source = ordinary.view(load.geometry.dtype).view(
        -1, *heads, 2 * SEGMENT_TOKENS, load.geometry.head_dim
    )
    num_pieces = len(source) * source.shape[3] // _PIECE_TOKENS
    num_gathered = num_pieces // 2
    shape = (*heads, num_gathered, _PIECE_TOKENS, load.geometry.head_dim)
    staging = registered[: ordinary.numel() // 2].view(load.geometry.dtype).view(shape)
    order = random_numbers((*heads, num_pieces), torch.float32).argsort(dim=-1)
    gather = gather_blocks_for(_CPU)

    def gathered(indices: Tensor) -> Callable[[], None]:
        blocks = BlockLists(
            indices=indices.contiguous(),
            num_blocks=torch.full(heads, num_gathered, device=_CPU),
            block_size=_PIECE_TOKENS,
        )
        return partial(gather, source, blocks, staging)

    # One half and the other: what was gathered lately would be found in the caches.
    seconds = sum(median_seconds(*map(gathered, order.split(num_gathered, dim=-1))))
    return rate("gather_gbs", ordinary.numel(), seconds) / 1e9


def hbm_gbs(accelerator: Accelerator) -> float:
    """GB/s read plus GB/s written by copies within the accelerator's memory."""
    stream = accelerator.current_stream()
    source, target = (_device_memory(accelerator, DEVICE_BYTES) for _ in range(2))

    def copy() -> None:
        for _ in range(_HBM_COPIES):
            stream.copy(target, source)
        stream.synchronize()

    (seconds,) = median_seconds(copy)
    return rate("hbm_gbs", 2 * _HBM_COPIES * DEVICE_BYTES, seconds) / 1e9


# What attends


def _load_of(geometry: KVGeometry, num_heads: int, batch_size: int) -> AttentionLoad:
    check_positive_int("num_heads", num_heads, "give the model's query heads")
    check_positive_int("batch_size", batch_size, "give the sequences of a step")
    if num_heads % geometry.num_kv_heads:
        raise LayoutError(
            f"num_heads={num_heads}: must be a multiple of num_kv_heads={geometry.num_kv_heads}; "
            "take both from the model's config"
        )
    if not geometry.dtype.is_floating_point:
        raise LayoutError(
            f"dtype={geometry.dtype}: attention takes floating-point numbers; measure with the "
            "dtype that these bytes are unpacked to"
        )
    return AttentionLoad(geometry=geometry, num_heads=num_heads, batch_size=batch_size)


def _memory_load() -> AttentionLoad:
    """Attention with few products for each byte: 4 query heads for each kv head."""
    geometry = KVGeometry(num_layers=1, num_kv_heads=8, head_dim=128)
    return AttentionLoad(geometry=geometry, num_heads=32, batch_size=BATCH_SIZE)


def _shared_kv_load(load: AttentionLoad) -> AttentionLoad:
    """DeepSeek-V4's attention, with as many sequences and in the same dtype."""
    geometry = KVGeometry(
        num_layers=1, num_kv_heads=1, head_dim=512, dtype=load.geometry.dtype, shared_kv=True
    )
    return AttentionLoad(geometry=geometry, num_heads=64, batch_size=load.batch_size)


def _is_limited_by_products(load: AttentionLoad, attended_gbs: float, cpu_tflops: float) -> bool:
    """Whether attention at that rate takes about as long as its products do."""
    intensity = flops_per_byte(
        num_heads=load.num_heads,
        head_dim=load.geometry.head_dim,
        head_dim_v=load.geometry.value_dim,
        bytes_per_token=load.geometry.bytes_per_token_per_layer,
    )
    return attended_gbs >= _NEAR_PRODUCTS * 1e3 * cpu_tflops / intensity


# Where


@contextmanager
def _memory(accelerator: Accelerator) -> Iterator[tuple[Tensor, Tensor]]:
    """Host memory, ordinary and registered: bytes of random numbers, given back at the end."""
    on_host = accelerator.device.type == "cpu"
    check_available(2 * HOST_BYTES + 2 * DEVICE_BYTES * on_host, "measuring this machine")
    with _host_memory(accelerator) as first, _host_memory(accelerator) as second:
        (ordinary, _), (registered, mapping) = first, second
        mapping.register(accelerator, HOST_BYTES)
        yield ordinary, registered


@contextmanager
def _host_memory(accelerator: Accelerator) -> Iterator[tuple[Tensor, Mapping]]:
    mapping = buffer_mapping(accelerator, (HOST_BYTES,), torch.uint8)
    memory = buffer_on(mapping, (HOST_BYTES,), torch.uint8)
    try:
        mapping.touch(HOST_BYTES, memory).wait()
        numbers = random_numbers((CHUNK_BYTES // 2,), torch.bfloat16).view(torch.uint8)
        for chunk in memory.split(CHUNK_BYTES):
            chunk.copy_(numbers[: len(chunk)])
        yield memory, mapping
    finally:
        # Not when the last tensor goes: an interrupt keeps it in its traceback.
        mapping.release(0)


def _device_memory(accelerator: Accelerator, num_bytes: int) -> Tensor:
    try:
        return accelerator.empty((num_bytes,), torch.uint8).zero_()
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"measuring this machine: {num_bytes >> 20} MiB do not fit on {accelerator.device}; "
            "free memory there, or measure before the model is loaded"
        ) from error


def _check_kernels(accelerator: Accelerator) -> None:
    if accelerator.device.type == "cuda" and decode_ops_for(accelerator.device) is None:
        raise LayoutError(
            f"direct_read_gbs: no kernels on {accelerator.device} that read host memory in place; "
            "pip install triton"
        )


def _accelerator_name(accelerator: Accelerator) -> str:
    if accelerator.device.type == "cpu":
        return "simulated accelerator"
    return torch.cuda.get_device_name(accelerator.device)


def _vram_bytes(accelerator: Accelerator) -> int:
    """The accelerator's memory; the simulated one has the host's."""
    if accelerator.device.type == "cpu":
        return total_bytes()
    return int(torch.cuda.get_device_properties(accelerator.device).total_memory)


def _num_threads() -> int:
    return num_attending_threads()
