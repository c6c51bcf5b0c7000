"""Jobs of the native library: flags, ends, cancelling, lifetimes, and Python beside them."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from native_process import run_python
from torch import Tensor

from sparsekv.errors import CacheStateError, LayoutError
from sparsekv.kernels import cpu
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.cpu import library
from sparsekv.kernels.cpu.jobs import (
    Flag,
    Job,
    JobStatus,
    _in_use,
    cancel_jobs,
    submit_copies,
    submit_partial_attention,
)
from sparsekv.kernels.cpu.prepared_job import PreparedAttentionJob

HANG = 60.0  # seconds; nothing here takes a hundredth of it
POISON = -7.0
every_size = pytest.mark.parametrize("num_threads", [1, 2, 4])


@pytest.fixture(autouse=True)
def native_library() -> Any:
    if library.native_library() is None:
        pytest.skip(f"no native library: {cpu.backend().reason}")
    yield
    cancel_jobs()
    library.set_num_threads(None)


def make_case(*, seed: int = 0, segments: int = 2, tokens: int = 9) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(segments, 2, 2, tokens, 16, generator=generator)
    return {
        "query": torch.randn(2, 4, 1, 16, generator=generator),
        "key": kv,
        "value": kv.flip(3),
        "positions": torch.arange(segments) * tokens,
        "softmax_scale": 0.25,
        "query_start": segments * tokens,
    }


CASE = make_case()
LARGE = make_case(segments=64, tokens=4096)  # takes some time


class Words:
    """The three words of each of several jobs, and their poisoned results."""

    def __init__(self, num_jobs: int) -> None:
        self.words = torch.zeros(num_jobs, 3, dtype=torch.int32)
        self.outs = torch.full((num_jobs, 2, 4, 1, 16), POISON)
        self.lses = torch.full((num_jobs, 2, 4, 1), POISON)

    def flag(self, job: int) -> Flag:
        return Flag(self.words, 3 * job)

    def done(self, job: int) -> Flag:
        return Flag(self.words, 3 * job + 1)

    def status(self, job: int) -> Flag:
        return Flag(self.words, 3 * job + 2)

    def submit(self, job: int, case: dict[str, Any] = CASE) -> Job:
        return submit_partial_attention(
            **case,
            out=self.outs[job],
            lse=self.lses[job],
            wait=(self.flag(job), 1),
            done=(self.done(job), 5),
            status=self.status(job),
        )

    def is_untouched(self, job: int) -> bool:
        return bool((self.outs[job] == POISON).all() and (self.lses[job] == POISON).all())


def assert_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


# Flags


def test_a_job_without_flags_starts_at_once() -> None:
    job = submit_partial_attention(**CASE)
    assert_equal(job.wait(HANG), cpu.partial_attention(**CASE))
    assert job.status == JobStatus.DONE
    assert_equal(job.wait(), cpu.partial_attention(**CASE))


@every_size
def test_flags_may_be_set_in_any_order(num_threads: int) -> None:
    library.set_num_threads(num_threads)
    count = 200
    words = Words(count)
    cases = [make_case(seed=seed) for seed in range(5)]
    jobs = [words.submit(i, cases[i % 5]) for i in range(count)]
    assert {job.status for job in jobs} == {JobStatus.UNENDED}
    order = random.Random(num_threads).sample(range(count), count)
    for i in order:
        words.flag(i).set(1)
    want = [cpu.partial_attention(**case) for case in cases]
    for i, job in enumerate(jobs):
        assert_equal(job.wait(HANG), want[i % 5])
    assert (words.words == torch.tensor([1, 5, JobStatus.DONE], dtype=torch.int32)).all()


def test_no_job_waits_for_the_flag_of_another() -> None:
    library.set_num_threads(1)
    words = Words(3)
    jobs = [words.submit(i) for i in range(3)]
    for i in (2, 1):
        words.flag(i).set(1)
        jobs[i].wait(HANG)
    assert jobs[0].status == JobStatus.UNENDED
    assert words.is_untouched(0)
    cpu.partial_attention(**LARGE)  # neither does a call


@pytest.mark.parametrize(
    ("value", "not_yet", "enough"),
    [
        (1, [0, 2**32 - 1, 2**31 + 1], 1),
        (1, [0], 2**31),
        (2**32 - 1, [2**32 - 2, 2**31 - 1], 0),
        (2**31, [2**31 - 1, 0], 2**31 + 5),
        (-1, [-2], 3),
    ],
)
def test_flags_wrap_around(value: int, not_yet: list[int], enough: int) -> None:
    flag, other = Flag(torch.zeros(1, dtype=torch.int32)), Words(1)
    flag.set(not_yet[0])
    job = submit_partial_attention(**CASE, wait=(flag, value))
    for early in not_yet:
        flag.set(early)
        other.flag(0).set(1)
        other.submit(0).wait(HANG)  # by then the flag has been looked at
        assert job.status == JobStatus.UNENDED
    flag.set(enough)
    job.wait(HANG)
    assert flag.value == enough % 2**32


def test_a_job_tells_for_how_long_it_ran_and_not_for_how_long_it_waited() -> None:
    words = Words(2)
    jobs = [words.submit(i, LARGE) for i in range(2)]
    time.sleep(0.3)
    assert jobs[0].seconds is None
    before = time.monotonic()
    words.flag(0).set(1)
    jobs[0].wait(HANG)
    assert 0 < (jobs[0].seconds or 0) <= time.monotonic() - before
    jobs[1].cancel()
    assert jobs[1].seconds is None


def test_a_job_of_many_keys_runs_longer_than_one_of_few() -> None:
    words, count = Words(20), 10
    jobs = [words.submit(i, CASE if i < count else LARGE) for i in range(2 * count)]
    for i, job in enumerate(jobs):
        words.flag(i).set(1)
        job.wait(HANG)
    seconds = [job.seconds or 0 for job in jobs]
    assert min(seconds) > 0
    assert min(seconds[:count]) < min(seconds[count:])


def test_the_status_precedes_the_flag() -> None:
    count = 100
    words = Words(count)
    seen: list[int] = []

    def watch() -> None:
        for i in range(count):
            while words.done(i).value != 5:
                time.sleep(0)
            seen.append(words.status(i).value)

    watcher = threading.Thread(target=watch)
    watcher.start()
    jobs = [words.submit(i) for i in range(count)]
    for i in range(count):
        if i % 3:
            words.flag(i).set(1)
            jobs[i].wait(HANG)
        else:
            jobs[i].cancel()
    watcher.join(HANG)
    assert seen == [JobStatus.DONE if i % 3 else JobStatus.CANCELLED for i in range(count)]


@every_size
def test_any_interleaving(num_threads: int) -> None:
    """Submitting, setting, cancelling, waiting, dropping, replacing threads: each job ends once."""
    library.set_num_threads(num_threads)
    want = cpu.partial_attention(**CASE)
    for seed in range(4):
        chance = random.Random(seed)
        words, jobs, is_set = Words(60), {}, set()
        for i in range(60):
            jobs[i] = words.submit(i)
            for _ in range(chance.randrange(3)):
                other = chance.choice(list(jobs))
                action = chance.choice(["set", "set", "cancel", "wait", "drop", "threads"])
                if action == "set":
                    words.flag(other).set(1)
                    is_set.add(other)
                elif action == "cancel":
                    jobs[other].cancel()
                elif action == "wait" and other in is_set:
                    if jobs[other].status != JobStatus.CANCELLED:
                        assert_equal(jobs[other].wait(HANG), want)
                elif action == "drop" and other != i:
                    del jobs[other]
                    assert words.done(other).value == 5
                elif action == "threads" and i % 10 == 0:
                    library.set_num_threads(chance.randrange(1, 5))
        for i in jobs:
            words.flag(i).set(1)
        for i in range(60):
            if i in jobs and jobs[i].status != JobStatus.CANCELLED:
                jobs[i].wait(HANG)
            assert words.done(i).value == 5
            is_done = words.status(i).value == JobStatus.DONE
            assert is_done or words.status(i).value == JobStatus.CANCELLED
            assert torch.equal(words.outs[i], want[0]) if is_done else words.is_untouched(i)


# Ends


def test_a_cancelled_job_writes_its_words_and_nothing_else() -> None:
    words = Words(2)
    jobs = [words.submit(i) for i in range(2)]
    jobs[0].cancel()
    assert jobs[0].status == words.status(0).value == JobStatus.CANCELLED
    cancel_jobs()
    for i, job in enumerate(jobs):
        words.flag(i).set(1)
        with pytest.raises(CacheStateError, match="was cancelled"):
            job.wait(HANG)
        assert words.done(i).value == 5
        assert words.is_untouched(i)


def test_cancelling_a_job_that_has_ended_changes_nothing() -> None:
    words = Words(1)
    words.flag(0).set(1)
    job = words.submit(0)
    job.wait(HANG)
    job.cancel()
    assert job.status == words.status(0).value == JobStatus.DONE


def test_a_job_that_runs_cannot_be_cancelled_halfway() -> None:
    want = cpu.partial_attention(**LARGE)
    for _ in range(5):  # wherever it is by then: whole results, or none
        words = Words(1)
        words.flag(0).set(1)
        job = words.submit(0, LARGE)
        job.cancel()
        while job.status == JobStatus.UNENDED:
            time.sleep(0)
        if job.status == JobStatus.DONE:
            assert torch.equal(words.outs[0], want[0])
        else:
            assert words.is_untouched(0)


def test_lists_are_read_after_the_flag_and_wrong_ones_fail() -> None:
    words = Words(2)
    indices = torch.full((2, 2, 3), -99)
    num_blocks = torch.full((2, 2), 77)
    blocks = BlockLists(indices=indices, num_blocks=num_blocks, block_size=4)
    jobs = [words.submit(i, CASE | {"blocks": blocks}) for i in range(2)]
    words.flag(0).set(1)
    for _ in range(2):  # it stays so
        with pytest.raises(LayoutError, match="names a block that does not exist"):
            jobs[0].wait(HANG)
    assert jobs[0].status == words.status(0).value == JobStatus.FAILED
    assert jobs[0].seconds is not None
    assert words.done(0).value == 5
    assert words.is_untouched(0)
    indices.copy_(torch.tensor([4, 0, 2]))
    num_blocks.copy_(torch.tensor([[3, 0], [1, 2]]))
    words.flag(1).set(1)
    assert_equal(jobs[1].wait(HANG), cpu.partial_attention(**CASE, blocks=blocks))


def test_every_option_of_the_call_is_one_of_the_job() -> None:
    options = {
        "row_table": torch.tensor([[1, 0], [0, 1]]),
        "key_mask": torch.arange(36).view(2, 18) % 5 > 0,
        "key_start": torch.tensor([0, 7]),
        "sliding_window": 12,
    }
    job = submit_partial_attention(**CASE, **options)
    options["key_start"].fill_(99)  # a small table: copied
    got = job.wait(HANG)
    options["key_start"].copy_(torch.tensor([0, 7]))
    assert_equal(got, cpu.partial_attention(**CASE, **options))


def test_waiting_has_a_limit() -> None:
    words = Words(1)
    job = words.submit(0)
    for timeout in (0, 0.01, -1):
        with pytest.raises(TimeoutError, match="has not ended"):
            job.wait(timeout)
    words.flag(0).set(1)
    job.wait(HANG)


def test_replaced_threads_leave_their_jobs_to_the_new_ones() -> None:
    library.set_num_threads(2)
    words = Words(40)
    jobs = [words.submit(i) for i in range(40)]
    for num_threads in (1, 4, 2):
        library.set_num_threads(num_threads)
    for i in range(40):
        words.flag(i).set(1)
    want = cpu.partial_attention(**CASE)
    for job in jobs:
        assert_equal(job.wait(HANG), want)


# Lifetimes


def test_small_tables_are_copied_and_tensors_kept_alive() -> None:
    want = cpu.partial_attention(**CASE, row_table=torch.tensor([[1, 0], [0, 1]]))
    words = Words(1)
    case = {n: x.clone() if isinstance(x, Tensor) else x for n, x in CASE.items()}
    row_table = torch.tensor([[1, 0], [0, 1]])
    job = submit_partial_attention(**case, row_table=row_table, wait=(words.flag(0), 1))
    case.pop("positions").fill_(99)
    row_table.fill_(99)
    del case
    junk = [torch.full((2, 2, 2, 9, 16), torch.nan) for _ in range(20)]  # into freed memory
    words.flag(0).set(1)
    assert_equal(job.wait(HANG), want)
    del junk


def test_other_tensors_are_read_after_the_flag() -> None:
    words = Words(1)
    case = CASE | {"query": torch.full_like(CASE["query"], torch.nan)}
    job = words.submit(0, case)
    case["query"].copy_(CASE["query"])
    words.flag(0).set(1)
    assert_equal(job.wait(HANG), cpu.partial_attention(**CASE))


def test_a_dropped_job_ends_before_its_memory_is_free() -> None:
    words = Words(2)
    job = words.submit(0)
    del job
    assert words.status(0).value == JobStatus.CANCELLED
    words.flag(1).set(1)
    submit_partial_attention(  # dropped at once, whether it runs or not
        **LARGE, wait=(words.flag(1), 1), done=(words.done(1), 5), status=words.status(1)
    )
    assert words.done(1).value == 5
    assert words.status(1).value != JobStatus.UNENDED


# Python beside them


def test_python_goes_on_beside_jobs() -> None:
    words = Words(1)
    job = words.submit(0, LARGE)
    steps = 0
    is_over = threading.Event()

    def advance() -> None:
        nonlocal steps
        while not is_over.is_set():
            steps += 1

    thread = threading.Thread(target=advance)
    thread.start()

    def advances() -> bool:
        before, end = steps, time.monotonic() + HANG
        while steps < before + 100 and time.monotonic() < end:
            with pytest.raises(TimeoutError):  # inside a wait that no job ends
                job.wait(0.001)
        return steps >= before + 100

    assert advances()
    words.flag(0).set(1)
    before = steps
    job.wait(HANG)  # while it runs
    assert steps > before
    is_over.set()
    thread.join()


def test_waiting_can_be_interrupted() -> None:
    words = Words(1)
    job = words.submit(0)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    # Shells let what they run in the background ignore it, and Python then does so too.
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            job.wait(HANG)
    finally:
        signal.signal(signal.SIGINT, old)
    assert job.status == JobStatus.UNENDED
    words.flag(0).set(1)
    job.wait(HANG)


SUBMIT = """
import os, sys, torch, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads: that is the test
from sparsekv.kernels.cpu.jobs import *
words = torch.zeros(3, dtype=torch.int32).share_memory_()
kv = torch.ones(1, 1, 1, 4, 8)
job = submit_partial_attention(
    kv[0, :, :, :1], kv, kv, torch.tensor([0]), 1.0, query_start=4,
    wait=(Flag(words, 0), 1), done=(Flag(words, 1), 1), status=Flag(words, 2))
"""


def test_the_interpreter_ends_with_jobs_that_wait(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_bytes(bytes(12))
    mapped = f"torch.from_file({str(words)!r}, shared=True, size=3, dtype=torch.int32)"
    code = SUBMIT.replace("torch.zeros(3, dtype=torch.int32).share_memory_()", mapped)
    done = run_python(code + "raise KeyboardInterrupt")
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    left = torch.frombuffer(bytearray(words.read_bytes()), dtype=torch.int32)
    assert left.tolist() == [0, 1, JobStatus.CANCELLED]


FORK = """
child = os.fork()
if not child:
    from sparsekv.errors import CacheStateError
    for look in (lambda: job.status, job.wait, job.cancel):
        try:
            look()
        except CacheStateError as error:
            assert "process that this one was forked from" in str(error)
        else:
            os._exit(1)
    cancel_jobs()
    other = submit_partial_attention(
        kv[0, :, :, :1], kv, kv, torch.tensor([0]), 1.0, query_start=4)
    assert torch.equal(other.wait(60)[0], kv[0, :, :, :1])
    waiting = submit_partial_attention(
        kv[0, :, :, :1], kv, kv, torch.tensor([0]), 1.0, wait=(Flag(words.clone(), 0), 1))
    del job
    sys.exit(0)  # in the usual way, with a job of its own that waits
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert words.tolist() == [0, 0, 0]  # the child left the parent's job alone
Flag(words, 0).set(1)
assert torch.equal(job.wait(60)[0], kv[0, :, :, :1])
assert words.tolist() == [1, 1, 1]
"""


def test_a_forked_child_leaves_the_jobs_of_its_parent_alone() -> None:
    done = run_python(SUBMIT + FORK)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_library_there_are_no_jobs() -> None:
    done = run_python(SUBMIT, SPARSEKV_CPU="torch")
    assert "LayoutError: jobs need the native library: SPARSEKV_CPU=torch" in done.stderr


# Wrong inputs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": CASE["query"].bfloat16(), "key": CASE["key"].bfloat16()}, "value torch.float32"),
        ({"query": CASE["query"].transpose(2, 3)}, "head_dim must be equal"),
        ({"query": torch.randn(2, 4, 1, 32)[..., ::2]}, "must be torch.float32 and contiguous"),
        ({"key_mask": torch.ones(36, 2, dtype=torch.bool).T}, "key_mask is torch.bool with"),
        ({"key_mask": torch.ones(2, 3, dtype=torch.bool)}, "beyond key_mask"),
        ({"row_table": torch.full((2, 2), 9)}, "row_table names"),
        ({"out": torch.zeros(2, 4, 1, 8)}, "out .2, 4, 1, 8. of torch.float32"),
        ({"lse": torch.zeros(2, 4, 1, dtype=torch.float64)}, "lse .* of torch.float64"),
    ],
)
def test_wrong_inputs_are_refused(changes: dict[str, Any], message: str) -> None:
    words = Words(1)
    with pytest.raises(LayoutError, match=message):
        submit_partial_attention(**(CASE | changes), done=(words.done(0), 5))
    assert words.done(0).value == 0


def test_wrong_flags_are_refused() -> None:
    for words in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.int32).T):
        with pytest.raises(LayoutError, match="must be int32, contiguous"):
            Flag(words)
    for index in (-1, 2):
        with pytest.raises(LayoutError, match="must be one of them"):
            Flag(torch.zeros(2, dtype=torch.int32), index)


# Prepared


def test_several_sets_of_keys_are_one_job() -> None:
    cases = [make_case(seed=seed, segments=1 + seed) for seed in range(3)]
    query, row_table = CASE["query"].clone(), torch.tensor([[1, 0]])
    out, lse = torch.full((3, 2, 4, 1, 16), POISON), torch.full((3, 2, 4, 1), POISON)
    parts = [(case["key"], case["value"], case["positions"], None) for case in cases]
    parts[0] = (*parts[0][:3], row_table)
    prepared = PreparedAttentionJob(query, parts, 0.25, out=out, lse=lse)
    words = Words(4)
    for turn, query_start in enumerate((40, 5, 0)):  # ever fewer keys are seen
        query.copy_(torch.randn(query.shape))
        job = prepared.submit(query_start, (words.flag(0), turn), (words.done(turn), 5))
        words.flag(0).set(turn)
        job.wait(HANG)
        assert words.done(turn).value == 5
        for i, case in enumerate(cases):
            usual = case | {"query": query, "query_start": query_start}
            table = row_table if i == 0 else None
            assert_equal((out[i], lse[i]), cpu.partial_attention(**usual, row_table=table))


def test_sets_of_keys_of_any_size_are_computed_together_as_each_alone() -> None:
    """The first of one row and head, so that its partial results wait for its last task while the
    others are computed.
    """
    library.set_num_threads(3)
    query = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(3))
    cases = []
    for segments in (9, 0, 2, 1):
        case = make_case(seed=segments, segments=segments, tokens=700 if segments == 9 else 9)
        key, value = case["key"][:, :1, :1], case["value"][:, :1, :1]
        cases.append((key, value, case["positions"], None))
    out, lse = torch.full((4, 1, 2, 40, 16), POISON), torch.full((4, 1, 2, 40), POISON)
    words = Words(1)
    prepared = PreparedAttentionJob(query, cases, 0.25, out=out, lse=lse)
    for turn in range(1, 21):
        out.fill_(POISON)
        job = prepared.submit(6300, (words.flag(0), turn), (words.done(0), turn))
        words.flag(0).set(turn)
        job.wait(HANG)
        for i, (key, value, positions, _) in enumerate(cases):
            alone = cpu.partial_attention(query, key, value, positions, 0.25, query_start=6300)
            assert_equal((out[i], lse[i]), alone)


def test_a_job_that_is_not_done_leaves_nan() -> None:
    key, value, positions = (CASE[name] for name in ("key", "value", "positions"))
    out, lse = torch.full((1, 2, 4, 1, 16), POISON), torch.full((1, 2, 4, 1), POISON)
    around = torch.cat((lse.flatten(), torch.full((1,), POISON)))
    lse = around[:-1].view(lse.shape)
    prepared = PreparedAttentionJob(
        CASE["query"], [(key, value, positions, None)], 0.25, out=out, lse=lse
    )
    words = Words(1)
    job = prepared.submit(18, (words.flag(0), 1), (words.done(0), 5))
    assert not lse.isnan().any()
    job.cancel()
    assert words.done(0).value == 5
    assert lse.isnan().all()
    assert around[-1] == POISON
    assert (out == POISON).all()
    words.flag(0).set(1)
    prepared.submit(18, (words.flag(0), 1), (words.done(0), 6)).wait(HANG)
    assert_equal((out[0], lse[0]), cpu.partial_attention(**CASE))


def test_what_cannot_be_prepared_is_refused() -> None:
    part = (CASE["key"], CASE["value"], CASE["positions"], None)
    out, lse = torch.zeros(1, 2, 4, 1, 16), torch.zeros(1, 2, 4, 1)
    for parts, room in (([], out), ([part] * 2, out), ([part], out[..., :8]), ([part], out.half())):
        with pytest.raises(LayoutError, match="out"):
            PreparedAttentionJob(CASE["query"], parts, 0.25, out=room, lse=lse)
    half = (part[0].half(), part[1].half(), part[2], None)
    with pytest.raises(LayoutError, match="reads it in place"):
        PreparedAttentionJob(CASE["query"].half(), [half], 0.25, out=out, lse=lse)
    words, row_table = Words(1), torch.tensor([[0, 0], [0, 2]])
    prepared = PreparedAttentionJob(
        CASE["query"],
        [part, (*part[:3], row_table)],
        0.25,
        out=out.repeat(2, 1, 1, 1, 1),
        lse=lse.repeat(2, 1, 1, 1),
    )
    with pytest.raises(LayoutError, match="names a physical row that does not exist"):
        prepared.submit(18, (words.flag(0), 0), (words.done(0), 5))
    assert words.done(0).value == 0


@every_size
def test_segments_are_copied_once_their_flag_is_set(num_threads: int) -> None:
    library.set_num_threads(num_threads)
    memory = torch.full((3, 4, 66, 40), POISON)
    places, words = (memory[:, 1:3, :65, 4:36], memory[1:, :1, :, 36:]), Words(1)
    sources = [torch.zeros(place.shape) for place in places]
    copies = list(zip(sources, places, strict=True))
    job = submit_copies(copies, (words.flag(0), 1), (words.done(0), 7))
    for source in sources:
        source.copy_(torch.randn(source.shape))
    assert (memory == POISON).all()
    assert words.done(0).value == 0
    words.flag(0).set(1)
    assert all(a is b for a, b in zip(job.wait(HANG), places, strict=True))
    assert words.done(0).value == 7
    for source, place in copies:
        assert torch.equal(place, source)
    written = sum(place.numel() for place in places)
    assert (memory == POISON).sum() == memory.numel() - written
    with pytest.raises(LayoutError, match="must be equal"):
        submit_copies([(sources[0], places[0][:2])])
    with pytest.raises(LayoutError, match="0 copies"):
        submit_copies([])


def test_a_job_that_ctrl_c_takes_from_python_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It strikes when the library has the job, and before Python knows what the call returned."""
    native, words = library.native_library(), Words(1)
    submit = native.sparsekv_submit_partial_attention

    def struck(*arguments: Any) -> None:
        submit(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(native, "sparsekv_submit_partial_attention", struck)
    before = len(_in_use)
    with pytest.raises(KeyboardInterrupt):
        words.submit(0)
    assert words.status(0).value == JobStatus.CANCELLED
    assert len(_in_use) == before


REPLACED = """
from sparsekv.kernels import cpu
from sparsekv.kernels.cpu import library

cpu.backend()
for _ in range(50):
    for num_threads in (24, 16, 48, 15):
        library.set_num_threads(num_threads)
        assert cpu.backend().num_threads == num_threads
"""


def test_many_idle_threads_can_be_replaced() -> None:
    """Each is woken, finds nothing to do and sleeps again, faster than all are woken."""
    done = run_python(REPLACED)
    assert done.returncode == 0, done.stderr
