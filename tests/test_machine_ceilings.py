"""The machine's ceilings: what is counted over which time, and nothing left behind.

Rates are checked with a clock that only the measured work moves.
"""

from __future__ import annotations

import gc
import math
from dataclasses import fields

import pytest
import torch
from harness import interrupt

from sparsekv.device import SimulatedAccelerator, SimulatedStream
from sparsekv.engine import attention_load, ceilings, medians
from sparsekv.engine.attention_load import AttentionLoad
from sparsekv.engine.ceilings import measure_machine
from sparsekv.engine.profile_key import cpu_name
from sparsekv.errors import CapacityError, LayoutError
from sparsekv.format import KVGeometry
from sparsekv.kernels.cpu import library
from sparsekv.regions import memory as host_memory
from sparsekv.roofline import CostModel, MachineProfile

CPU = torch.device("cpu")
GQA = KVGeometry(num_layers=1, num_kv_heads=2, head_dim=64)
GEOMETRIES = {
    "gqa bf16": (GQA, 8),
    "gqa fp32": (KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float32), 2),
    "wide values": (KVGeometry(num_layers=1, num_kv_heads=1, head_dim=24, head_dim_v=40), 3),
    "latents": (
        KVGeometry(num_layers=1, num_kv_heads=1, head_dim=72, head_dim_v=64, shared_kv=True),
        16,
    ),
}
COST = CostModel(
    cpu_s_per_token=1e-6, h2d_s_per_token=2e-6, cpu_overhead_s=3e-4, gpu_overhead_s=4e-5
)
RATES = [field.name for field in fields(MachineProfile) if field.name.endswith(("gbs", "tflops"))]
GBS = 1e9


@pytest.fixture
def small(monkeypatch):
    """Sizes that take milliseconds."""
    for name, value in (
        ("HOST_BYTES", 2 << 20),
        ("DEVICE_BYTES", 64 << 10),
        ("CHUNK_BYTES", 256 << 10),
        ("BATCH_SIZE", 1),
        ("PRODUCTS_S", 0.0),
    ):
        monkeypatch.setattr(ceilings, name, value)
    monkeypatch.setattr(medians, "MOST_ROUNDS", 3)


@pytest.fixture
def accelerator(monkeypatch):
    """The one that is opened."""
    accelerator = Accelerator()
    monkeypatch.setattr(ceilings, "open_accelerator", lambda device: accelerator)
    return accelerator


class Accelerator(SimulatedAccelerator):
    """Counts the bytes that were ever registered."""

    def __init__(self):
        super().__init__()
        self.registered_bytes = 0

    def register(self, address, num_bytes):
        super().register(address, num_bytes)
        self.registered_bytes += num_bytes


@pytest.fixture
def mapped(monkeypatch):
    """All mappings that were made."""
    made, make = [], ceilings.buffer_mapping

    def buffer_mapping(*args):
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(ceilings, "buffer_mapping", buffer_mapping)
    return made


def measure(kind="gqa bf16", cost=COST, **changes):
    geometry, num_heads = GEOMETRIES[kind]
    arguments = {"num_heads": num_heads, "batch_size": 2, "device": CPU, "cost": cost, **changes}
    return measure_machine(geometry, **arguments)


# Whole


@pytest.mark.parametrize("kind", GEOMETRIES)
def test_every_rate_is_measured(small, kind):
    machine = measure(kind)
    for name in RATES:
        value = getattr(machine, name)
        assert math.isfinite(value), name
        assert value > 0, name
    threads = library.backend().num_threads
    assert machine.num_threads == threads
    assert machine.name == f"simulated accelerator, {cpu_name()}, {threads} threads"
    assert machine.ram_bytes == machine.vram_bytes == host_memory.total_bytes()
    assert MachineProfile.from_json(machine.to_json()) == machine


def test_what_the_costs_imply_comes_from_there(small):
    machine = measure()
    bytes_per_token = 2 * GQA.bytes_per_token_per_layer
    assert machine.h2d_gbs == pytest.approx(bytes_per_token / 2e-6 / GBS)
    assert (machine.cpu_overhead_s, machine.gpu_overhead_s) == (3e-4, 4e-5)


def test_it_works_without_the_native_library(small, monkeypatch):
    monkeypatch.setattr(library, "_loaded", library._Loaded(reason="a test"))
    assert measure().num_threads == torch.get_num_threads()


def test_it_works_in_whatever_mode_the_caller_is(small):
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    with torch.inference_mode(), torch.device("meta"):
        measure()
    assert torch.equal(torch.randn(4, device="cpu"), expected), "the caller's numbers are used up"


# Which limit

PRODUCTS_TFLOPS = 0.1
"""Products over keys in the caches: 25 GB/s for the 4 operations a byte of `GQA`."""


@pytest.fixture
def given_rates(small, monkeypatch):
    """Products as above; memory gives 40 GB/s beside copies."""
    asked = []

    def busy_read_gbs(accelerator, ordinary, registered, copies_per_byte):
        asked.append(copies_per_byte)
        return 40.0

    monkeypatch.setattr(ceilings, "products_tflops", lambda load: PRODUCTS_TFLOPS)
    monkeypatch.setattr(ceilings, "cpu_read_gbs", lambda *memories: (50.0, 50.0))
    monkeypatch.setattr(ceilings, "busy_read_gbs", busy_read_gbs)
    return asked


def cost_at(cpu_gbs, h2d_gbs=10.0):
    return CostModel.from_bandwidths(
        bytes_per_token=2 * GQA.bytes_per_token_per_layer, cpu_gbs=cpu_gbs, h2d_gbs=h2d_gbs
    )


@pytest.mark.parametrize("cpu_gbs", [1.0, 12.0, 19.5])
def test_what_memory_limits_reads_at_the_rate_of_its_cost(given_rates, cpu_gbs):
    machine = measure(cost=cost_at(cpu_gbs))
    assert machine.cpu_read_gbs == pytest.approx(cpu_gbs)
    assert not given_rates, "nothing else need be measured"
    assert machine.attention_gbs(flops_per_byte=4) == pytest.approx(cpu_gbs), "its own rate"


@pytest.mark.parametrize("cpu_gbs", [20.5, 25.0, 30.0])
def test_where_products_limit_memory_is_measured_with_other_attention(given_rates, cpu_gbs):
    machine = measure(cost=cost_at(cpu_gbs, h2d_gbs=20.0))
    assert machine.cpu_read_gbs == 40.0
    assert given_rates == [pytest.approx(2 * 20 / 50)], "copies that last twice as long as it"


def test_memory_gave_what_was_attended_to(given_rates):
    assert measure(cost=cost_at(60.0)).cpu_read_gbs == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("registered_gbs", "expected"), [(50.0, True), (45.5, True), (44.5, False), (60.0, True)]
)
def test_registered_memory_is_read_at_full_speed_from_nine_tenths_on(
    given_rates, monkeypatch, registered_gbs, expected
):
    monkeypatch.setattr(ceilings, "cpu_read_gbs", lambda *memories: (50.0, registered_gbs))
    assert measure().reads_pinned_at_full_speed is expected


# What is counted


class Clock:
    """Moves by what work takes, and by nothing else."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(medians, "perf_counter", lambda: self.now)

    def work(self, amount, per_second):
        self.now += amount / per_second


class Stream(SimulatedStream):
    """Copies that take time: those from the host only until somebody waits."""

    clock: Clock
    queued_bytes = 0

    def _to_host(self, host, source):
        self.clock.work(host.numel(), 55 * GBS)

    def _from_host(self, target, host):
        Stream.queued_bytes += host.numel()

    def copy(self, target, source):
        assert target.data_ptr() != source.data_ptr()
        self.clock.work(2 * target.numel(), 4000 * GBS)

    def synchronize(self):
        Stream.queued_bytes = 0


class Timed(SimulatedAccelerator):
    """Streams as above."""

    def current_stream(self):
        return Stream(self)


@pytest.fixture
def clock(small, monkeypatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(Stream, "clock", clock, raising=False)
    monkeypatch.setattr(Stream, "queued_bytes", 0)
    return clock


@pytest.fixture
def memories():
    return tuple(torch.zeros(2 << 20, dtype=torch.uint8) for _ in range(2))


def attend_with(monkeypatch, attend, device=CPU):
    """Let attention be this function of (query, key, value)."""

    def partial_attention_for(asked):
        assert asked == device
        return lambda query, key, value, *args, **kwargs: attend(query, key, value)

    monkeypatch.setattr(attention_load, "partial_attention_for", partial_attention_for)


def assert_all_of(memory, key, value):
    """Keys and values are the whole memory, each byte once."""
    assert key.numel() + value.numel() == memory.numel() // 2
    assert key.data_ptr() == memory.data_ptr()
    places = torch.zeros(memory.numel() // 2, dtype=torch.int8)
    for part in (key, value):
        offset = (part.data_ptr() - memory.data_ptr()) // 2
        places.as_strided(part.shape, part.stride(), offset).add_(1)
    assert (places == 1).all()


def test_copies_are_counted_once(clock):
    assert ceilings.d2h_gbs(Timed(), torch.zeros(2 << 20, dtype=torch.uint8)) == pytest.approx(55)


def test_copies_on_the_accelerator_count_what_is_read_and_written(clock):
    assert ceilings.hbm_gbs(Timed()) == pytest.approx(4000)


def test_the_accelerator_reads_all_of_registered_memory_in_place(clock, memories, monkeypatch):
    accelerator = Timed()
    accelerator.device = torch.device("meta")

    def attend(query, key, value):
        assert query.device.type == "meta"
        assert_all_of(memories[1], key, value)
        clock.work(memories[1].numel(), 51 * GBS)

    attend_with(monkeypatch, attend, accelerator.device)
    assert ceilings.direct_read_gbs(accelerator, memories[1]) == pytest.approx(51)


def test_the_cpu_reads_both_memories_in_turn(clock, memories, monkeypatch):
    turns = []

    def attend(query, key, value):
        turn = [memory.data_ptr() for memory in memories].index(key.data_ptr())
        assert_all_of(memories[turn], key, value)
        clock.work(memories[turn].numel(), (100, 90)[turn] * GBS)
        turns.append(turn)

    attend_with(monkeypatch, attend)
    assert ceilings.cpu_read_gbs(*memories) == pytest.approx((100, 90))
    assert turns == [0, 1] * (len(turns) // 2), "the caches must not hold what comes next"


def test_reading_beside_copies_is_timed_while_they_run(clock, memories, monkeypatch):
    lengths = []

    def attend(query, key, value):
        if key.data_ptr() == memories[0].data_ptr():
            lengths.append(Stream.queued_bytes)
        clock.work(memories[0].numel(), (70 if Stream.queued_bytes else 110) * GBS)

    attend_with(monkeypatch, attend)
    assert ceilings.busy_read_gbs(Timed(), *memories, 1.5) == pytest.approx(70)
    assert min(lengths) >= 1.5 * memories[0].numel()
    assert max(lengths) <= 1.5 * memories[0].numel() + ceilings.CHUNK_BYTES
    assert Stream.queued_bytes == 0, "nothing is left in the stream"


def test_the_queue_of_copies_is_bounded(clock, memories, monkeypatch):
    counts = []

    def attend(query, key, value):
        counts.append(Stream.queued_bytes)
        clock.work(1, 1)

    attend_with(monkeypatch, attend)
    ceilings.busy_read_gbs(Timed(), *memories, 1000.0)
    assert max(counts) == 256 * ceilings.CHUNK_BYTES


def test_gathered_pieces_have_16_kib_and_come_from_everywhere(clock, memories, monkeypatch):
    ordinary, registered = memories
    seen = []

    def gather(source, blocks, out):
        assert source.data_ptr() == ordinary.data_ptr()
        assert out.data_ptr() == registered.data_ptr()
        assert blocks.block_size * source.stride(3) * 2 == 16 << 10
        blocks.check_indices(source.shape[0] * source.shape[3])
        assert out.is_contiguous()
        seen.append(blocks.indices)
        clock.work(out.numel() * 2, 60 * GBS)

    monkeypatch.setattr(ceilings, "gather_blocks_for", lambda device: gather)
    assert ceilings.gather_gbs(ordinary, registered) == pytest.approx(60)
    first, second = seen[:2]
    every = torch.cat([first, second], dim=-1).sort(dim=-1).values
    assert torch.equal(every, torch.arange(every.shape[-1]).expand_as(every)), "each piece once"
    assert not torch.equal(first, first.sort(dim=-1).values), "in random order"


@pytest.mark.parametrize("kind", GEOMETRIES)
def test_products_are_those_of_keys_that_stay_in_the_caches(clock, monkeypatch, kind):
    geometry, num_heads = GEOMETRIES[kind]
    load = AttentionLoad(geometry=geometry, num_heads=num_heads, batch_size=3)
    monkeypatch.setattr(ceilings, "PRODUCTS_S", 1e-5)
    fewest, longest = load.segment_flops / 5e12, 0.0
    delays = iter([1.0])  # seconds of the first call that are not its own

    def attend(query, key, value):
        nonlocal longest
        assert key.untyped_storage().nbytes() <= 512 << 10
        assert query.shape == (3, num_heads, 1, geometry.head_dim)
        assert key.shape[1:3] == (3, geometry.num_kv_heads)
        flops = 2 * num_heads * key.shape[0] * 3 * key.shape[3] * (key.shape[4] + value.shape[4])
        clock.work(flops, 5e12)
        clock.work(next(delays, 0.0), 1)
        longest = max(longest, flops / 5e12)

    attend_with(monkeypatch, attend)
    assert ceilings.products_tflops(load) == pytest.approx(5)
    assert longest >= 1e-5
    assert longest < 2e-5 or longest == pytest.approx(fewest), (
        "long enough, and no longer than that"
    )


def test_medians_forget_the_first_round_and_single_disturbances(monkeypatch):
    clock, calls = Clock(monkeypatch), []
    times = iter([9.0, 1.0, 1.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0] * 2)
    monkeypatch.setattr(medians, "ENOUGH_S", math.inf)

    def first():
        calls.append("first")
        clock.work(next(times), 1)

    def second():
        calls.append("second")
        clock.work(2, 1)

    assert medians.median_seconds(first, second) == [1.0, 2.0]
    assert calls == ["first", "second"] * (medians.MOST_ROUNDS + 1)


def test_slow_machines_get_fewer_rounds_but_some(monkeypatch):
    clock, calls = Clock(monkeypatch), []

    def slow():
        calls.append(clock.work(10, 1))

    assert medians.median_seconds(slow) == [10.0]
    assert len(calls) == medians.LEAST_ROUNDS + 1


# What cannot be measured


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads=3: must be a multiple of num_kv_heads=2; take"),
        ({"num_heads": 0}, "num_heads=0: must be a whole number of at least 1; give"),
        ({"batch_size": 0}, "batch_size=0: must be a whole number of at least 1; give"),
        ({"cost": CostModel(cpu_s_per_token=0, h2d_s_per_token=1)}, "cpu_s_per_token: .*again"),
        ({"cost": CostModel(cpu_s_per_token=1, h2d_s_per_token=0)}, "h2d_s_per_token: .*again"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(small, mapped, changes, message):
    with pytest.raises(LayoutError, match=message):
        measure(**changes)
    assert not mapped


def test_packed_entries_are_refused(small):
    packed = KVGeometry(
        num_layers=1, num_kv_heads=1, head_dim=584, dtype=torch.uint8, shared_kv=True
    )
    with pytest.raises(LayoutError, match=r"dtype=torch.uint8: .*measure with the dtype"):
        measure_machine(packed, num_heads=64, batch_size=1, device=CPU, cost=COST)


def test_a_clock_that_stands_still_is_told_of(small, accelerator, mapped, monkeypatch):
    Clock(monkeypatch)
    monkeypatch.setattr(ceilings, "MOST_SEGMENTS", 4)
    with pytest.raises(LayoutError, match=r"cpu_tflops: measured in 0.0 s, must .*; measure again"):
        measure()
    assert_nothing_is_left(accelerator, mapped)


def test_short_memory_is_refused_before_anything_is_mapped(small, mapped, monkeypatch):
    needed = 2 * ceilings.HOST_BYTES + 2 * ceilings.DEVICE_BYTES
    monkeypatch.setattr(host_memory, "available_bytes", lambda: needed - 1)
    with pytest.raises(CapacityError, match=r"measuring this machine: needs .* free memory"):
        measure()
    assert not mapped
    monkeypatch.setattr(host_memory, "available_bytes", lambda: needed)
    measure()


def test_memory_that_may_not_be_registered_is_given_back(small, accelerator, mapped, monkeypatch):
    def register(address, num_bytes):
        raise CapacityError("refused; raise the limit of locked memory (ulimit -l)")

    monkeypatch.setattr(accelerator, "register", register)
    with pytest.raises(CapacityError, match="ulimit -l"):
        measure()
    assert_nothing_is_left(accelerator, mapped)


def test_a_full_accelerator_is_told_of(small, accelerator, mapped, monkeypatch):
    def empty(shape, dtype):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(accelerator, "empty", empty)
    with pytest.raises(CapacityError, match=r"MiB do not fit on cpu; .* before the model is load"):
        measure()
    assert_nothing_is_left(accelerator, mapped)


def test_without_triton_there_is_nothing_to_read_in_place(small, accelerator, mapped, monkeypatch):
    monkeypatch.setattr(accelerator, "device", torch.device("cuda:0"))
    monkeypatch.setattr(ceilings, "decode_ops_for", lambda device: None)
    with pytest.raises(
        LayoutError, match=r"direct_read_gbs: no kernels on cuda:0 .*install triton"
    ):
        measure()
    assert not mapped


# Nothing is left


def assert_nothing_is_left(accelerator, mapped):
    assert mapped
    assert not accelerator.registered
    assert [mapping.resident_bytes() for mapping in mapped] == [0] * len(mapped)


def test_everything_is_given_back(small, accelerator, mapped):
    measure()
    assert accelerator.registered_bytes == ceilings.HOST_BYTES, "one piece, so copies cross none"
    assert not accelerator.registered
    gc.collect()
    assert [mapping._mapped_bytes for mapping in mapped] == [0, 0]


class Interrupting:
    """Times calls like `seconds_of`, but for the one that is interrupted."""

    def __init__(self, monkeypatch, at_call):
        self.num_calls = 0
        self._at_call = at_call
        for module in (medians, ceilings):
            monkeypatch.setattr(module, "seconds_of", self)

    def __call__(self, call):
        self.num_calls += 1
        call()
        if self.num_calls == self._at_call:
            raise KeyboardInterrupt
        return 1.0


def test_an_interrupt_in_any_measurement_leaves_nothing(small, accelerator, mapped, monkeypatch):
    """The exception, and with it every tensor, is alive when the memory is looked at."""
    monkeypatch.setattr(medians, "MOST_ROUNDS", 1)
    monkeypatch.setattr(medians, "LEAST_ROUNDS", 1)
    cost = CostModel(cpu_s_per_token=1e-30, h2d_s_per_token=1e-6)  # so that all is measured
    whole = Interrupting(monkeypatch, None)
    measure(cost=cost)
    assert whole.num_calls > 20
    for at_call in range(1, whole.num_calls + 1):
        Interrupting(monkeypatch, at_call)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            measure(cost=cost)
        assert_nothing_is_left(accelerator, mapped)
        assert interrupted.tb is not None
        mapped.clear()


@pytest.mark.parametrize("stride", [797, pytest.param(53, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_line_leaves_nothing(small, accelerator, monkeypatch, stride):
    monkeypatch.setattr(medians, "MOST_ROUNDS", 1)
    monkeypatch.setattr(medians, "LEAST_ROUNDS", 1)
    at_line, num_lines = 1, 0
    while interrupt(at_line, measure):
        gc.collect()
        assert not accelerator.registered
        at_line, num_lines = at_line + stride, num_lines + 1
    assert num_lines > 3


# The real thing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("geometry", "num_heads"),
    [
        (KVGeometry(num_layers=1, num_kv_heads=4, head_dim=128), 32),
        (KVGeometry(num_layers=1, num_kv_heads=1, head_dim=512, shared_kv=True), 64),
    ],
)
def test_rates_of_a_real_machine_fit_together(geometry, num_heads):
    bytes_per_token = 16 * geometry.bytes_per_token_per_layer
    cost = CostModel.from_bandwidths(bytes_per_token=bytes_per_token, cpu_gbs=20, h2d_gbs=20)
    machine = measure_machine(
        geometry, num_heads=num_heads, batch_size=16, device=torch.device("cuda"), cost=cost
    )
    assert machine.direct_read_gbs <= 1.3 * machine.d2h_gbs, "both cross the same bus"
    assert machine.d2h_gbs <= 4 * machine.direct_read_gbs
    assert machine.hbm_gbs > 4 * machine.d2h_gbs
    assert 0.1 * machine.cpu_read_gbs < machine.gather_gbs < 10 * machine.cpu_read_gbs
    assert machine.vram_bytes == torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.get_device_name(0) in machine.name
    assert (torch.arange(4, device="cuda") * 2).sum().item() == 12, "no error is left behind"
