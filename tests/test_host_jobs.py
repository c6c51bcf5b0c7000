"""The CPU's part of a step as jobs beside the accelerator: right, or NaN and an error; never lost,
never waited for in vain.
"""

import gc
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path

import pytest
import torch
from harness import Twin, accelerators, build, geometry, new_tokens, spec
from simulated_streams import LateCaller
from test_step import TOLERANCE, assert_attends, assert_redone_after_ctrl_c, whole

from sparsekv.attention import HostCalls, HostJobs, Recent, host_jobs, timings
from sparsekv.engine import attend
from sparsekv.errors import CacheStateError
from sparsekv.kernels import dispatch
from sparsekv.kernels.dispatch import PreparedAttentionJob

_SLEEP_CYCLES = 200_000_000  # about 0.1 s

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request):
    if dispatch.attention_jobs() is None:
        pytest.skip("no native library")
    return request.param


@pytest.fixture
def no_calls(monkeypatch):
    """Whatever the CPU attends to is a job's."""

    def begin(self, question, parts):
        raise AssertionError("attended by a call")

    monkeypatch.setattr(HostCalls, "begin", begin)


def step(twin, layer_idx=0, num_queries=1, **masks):
    """(what `attend` gives, what is right) for new queries of one layer."""
    kv = twin.cache.spec.geometry
    shape = (twin.cache.batch_size, 2 * kv.num_kv_heads, num_queries, kv.head_dim)
    query = torch.randn(shape, device=twin.cache.device).to(kv.dtype)
    found = attend(twin.cache, layer_idx, query, 0.3, **masks)
    return found, whole(twin, layer_idx, query, 0.3, **masks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_jobs_give_what_attention_to_the_whole_gives(device, no_calls, dtype):
    twin = Twin(build(spec(geometry(dtype=dtype)), share=0.5, device=device))
    twin.append(30)
    for num_queries in (1, 3, 1):
        twin.append(num_queries, flush=False)
        assert_attends(twin, num_queries)
        twin.append(num_queries, flush=False)
        key_mask = torch.rand(2, twin.cache.num_tokens, device=device) < 0.7
        assert_attends(twin, num_queries, key_mask=key_mask)
    twin.cache.batch_select_indices(torch.tensor([1, 0, 1]))
    twin.apply(lambda tensor: tensor[[1, 0, 1]])
    twin.append(20)  # more rows: another run of slots, and larger buffers
    twin.append(1, flush=False)
    assert_attends(twin, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_and_float64_are_attended_by_calls(device, dtype):
    twin = Twin(build(spec(geometry(dtype=dtype)), share=0.5, device=device))
    twin.append(30)
    twin.append(2, flush=False)
    mask = torch.rand(2, 1, 2, 32, device=device) < 0.5
    assert_attends(twin, 2, mask=mask)
    twin.append(1, flush=False)
    assert_attends(twin, 1)


def test_without_the_library_calls_do_it(monkeypatch):
    monkeypatch.setattr(host_jobs, "attention_jobs", lambda: None)
    twin = Twin(build(share=0.5))
    twin.append(30)
    assert_attends(twin, 1)


def test_buffers_that_would_be_too_large_are_not_made(device, monkeypatch):
    monkeypatch.setattr(host_jobs, "_MOST_BYTES", 1000)
    twin = Twin(build(share=0.5, device=device))
    twin.append(30)
    twin.append(9, flush=False)
    assert_attends(twin, 9)
    assert twin.cache.companion.host._host.numel() == 0


# Timings


def timed(twin):
    """What has been noted of the CPU, in all layers of the steps since the last call."""
    twin.cache.companion.synchronize()
    return twin.cache.companion.timings.cpu.take()


@pytest.mark.parametrize("are_jobs", [True, False])
def test_the_time_of_each_part_is_noted_with_its_tokens(device, are_jobs, monkeypatch):
    if not are_jobs:
        monkeypatch.setattr(host_jobs, "attention_jobs", lambda: None)
    twin = Twin(build(share=0.5, device=device))
    twin.append(30)
    step(twin)
    assert timed(twin) == [], "nobody has asked yet"
    expected, start = [], time.monotonic()
    for _ in range(20):
        twin.append(1, flush=False)
        expected += 2 * [sum(view.num_tokens for view in twin.cache.step_views(0).unpinned)]
        assert_attends(twin, 1)
    found = timed(twin)
    assert [num_tokens for num_tokens, _ in found] == expected
    assert min(seconds for _, seconds in found) > 0
    assert sum(seconds for _, seconds in found) <= time.monotonic() - start
    assert timed(twin) == []


def test_what_is_borrowed_counts_as_the_cpus(device):
    twin = Twin(build(share=0.5, device=device, step_share=1))
    twin.append(30)
    step(twin)
    timed(twin)
    step(twin)
    assert [num_tokens for num_tokens, _ in timed(twin)] == [28]


@pytest.mark.parametrize("are_jobs", [True, False])
def test_attention_of_several_queries_says_nothing_of_a_step(device, are_jobs, monkeypatch):
    if not are_jobs:
        monkeypatch.setattr(host_jobs, "attention_jobs", lambda: None)
    twin = Twin(build(share=0.5, device=device))
    twin.append(30)
    step(twin)
    timed(twin)
    step(twin, num_queries=2)
    assert timed(twin) == []


def test_the_latest_timings_are_kept(device, monkeypatch):
    monkeypatch.setattr(timings, "_MOST_KEPT", 3)
    twin = Twin(build(share=1, device=device))
    twin.append(4)
    step(twin)
    timed(twin)
    for length in (4, 4, 4, 4):
        twin.append(length)
        step(twin)
    assert [num_tokens for num_tokens, _ in timed(twin)] == [12, 16, 20]


# Failures


def test_a_cancelled_job_gives_nan_and_an_error_at_the_next_step(device, no_calls, monkeypatch):
    twin = Twin(build(share=0.5, device=device))
    twin.append(30)
    submit = PreparedAttentionJob.submit

    def submit_in_vain(*args):
        job = submit(*args)
        job.cancel()
        return job

    step(twin)  # whose results must not show in the next one's
    with monkeypatch.context() as patch:
        patch.setattr(PreparedAttentionJob, "submit", submit_in_vain)
        found, expected = step(twin)
    assert found.isnan().all()
    assert not expected.isnan().any()
    timed(twin)  # of the first one
    with pytest.raises(CacheStateError, match="cancelled"):
        step(twin)
    assert timed(twin) == []
    found, expected = step(twin)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[torch.float32], rtol=1e-5)
    twin.check()


@pytest.mark.parametrize("where", ["submit", "window", "chunk", "finish"])
@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)
def test_a_step_that_fails_midway_leaves_streams_and_cache_in_order(
    device, no_calls, monkeypatch, where, error
):
    twin = Twin(build(spec(batch_size=1), share=0.5, device=device))
    twin.append(30)
    twin.append(1, flush=False)
    cache, calls = twin.cache, []
    step(twin)

    def fail(*args, **kwargs):
        calls.append(where)
        raise error

    with monkeypatch.context() as patch:
        if where == "submit":
            patch.setattr(PreparedAttentionJob, "submit", fail)
        elif where == "chunk":
            patch.setattr("sparsekv.engine.step.reads_in_place", lambda *arguments: False)
            patch.setattr(cache.ping_pong, "take", fail)
        elif where == "finish":
            patch.setattr(HostJobs, "_finish", fail)
        else:
            patch.setattr("sparsekv.attention.split.merge_partials", fail)
        with pytest.raises(type(error)):
            step(twin, num_queries=2)  # which no prepared launches attend to
    assert calls == [where]
    cache.accelerator.current_stream().synchronize()  # nothing hangs
    for layer_idx in range(2):
        found, expected = step(twin, layer_idx)
        torch.testing.assert_close(found, expected, atol=TOLERANCE[torch.float32], rtol=1e-5)
    twin.check()


def test_a_job_that_was_begun_in_vain_is_cancelled_by_the_next_step(device, no_calls, monkeypatch):
    twin, jobs = Twin(build(share=0.5, device=device)), []
    twin.append(30)
    submit = PreparedAttentionJob.submit

    def submit_noted(*args):
        jobs.append(submit(*args))
        return jobs[-1]

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(PreparedAttentionJob, "submit", submit_noted)
    with monkeypatch.context() as patch:
        patch.setattr(type(twin.cache.accelerator.current_stream()), "write_flag", fail)
        with pytest.raises(KeyboardInterrupt):
            step(twin, layer_idx=0)
    assert jobs[0].status == dispatch.JobStatus.UNENDED
    found, expected = step(twin, layer_idx=1)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[torch.float32], rtol=1e-5)
    assert not jobs[0].drop.alive  # by that it was cancelled
    assert jobs[1].wait(60)


def test_a_job_that_nobody_was_told_of_is_dropped_by_the_next_step(device, no_calls, monkeypatch):
    """Ctrl-C strikes before its submission returns, and somebody keeps the error."""
    twin, jobs = Twin(build(share=0.5, device=device)), []
    twin.append(30)
    submit = PreparedAttentionJob.submit

    def strike(*args):
        jobs.append(submit(*args))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreparedAttentionJob, "submit", strike)
        with pytest.raises(KeyboardInterrupt):
            step(twin, layer_idx=0)
    assert jobs[0].drop.alive
    found, expected = step(twin, layer_idx=1)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[torch.float32], rtol=1e-5)
    assert not jobs[0].drop.alive


def test_what_a_failed_step_leaves_does_not_end_an_earlier_wait():
    """The stream is behind when the second job is dropped, whose end is then said at once."""
    if dispatch.attention_jobs() is None:
        pytest.skip("no native library")
    with accelerators(LateCaller):
        twin = Twin(build(share=1))
        twin.append(4000)
        cache, query = twin.cache, torch.randn(2, 4, 1, 4)
        expected = whole(twin, 0, query, 0.3)
        host, unpinned = HostJobs(cache.registrar, Recent()), cache.views(0).unpinned
        question = host_jobs.Question(
            query=query, softmax_scale=0.3, query_start=3999, key_mask=None, mask=None
        )
        ((found, _),) = host.begin(question, unpinned)()
        host.begin(question, unpinned)
        host.look_back()
        cache.accelerator.current_stream().synchronize()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stride", [23, pytest.param(3, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_line_of_a_step_leaves_it_to_be_done_again(device, no_calls, stride):
    twin = Twin(build(spec(batch_size=1), share=0.5, device=device))
    twin.append(31)
    query = torch.randn(1, 4, 1, 4, device=device)
    assert_redone_after_ctrl_c(twin, query, stride)


# Lifetime


def test_reset_lets_go_of_what_jobs_have_read(device):
    twin = Twin(build(share=0.5, device=device))
    twin.append(30)
    step(twin)
    lease = weakref.ref(twin.cache._layers[0].stacks["unpinned"].leases[0])
    twin.cache.reset()
    gc.collect()
    assert lease() is None
    assert not twin.cache.companion.host._in_flight.awaited
    idle = twin.cache._pool.idle_bytes()
    assert idle > 0


def test_a_dropped_cache_still_answers(device):
    """What was asked before it was let go of is right, not cancelled."""
    twin = Twin(build(share=0.5, device=device))
    twin.append(30)
    if device == "cuda":
        torch.cuda._sleep(_SLEEP_CYCLES)
    found, expected = step(twin)
    del twin
    gc.collect()
    torch.testing.assert_close(found, expected, atol=TOLERANCE[torch.float32], rtol=1e-5)


def test_a_process_ends_in_silence_after_a_step_that_failed(device):
    script = f"""
        import sys
        sys.path.insert(0, "tests")
        import torch
        from harness import Twin, build
        from sparsekv.engine import attend

        twin = Twin(build(share=0.5, device="{device}"))
        twin.append(30)
        assert twin.cache.accelerator.has_flags  # tried by then
        type(twin.cache.accelerator.current_stream()).wait_flag = None
        try:
            attend(twin.cache, 0, torch.zeros(2, 4, 1, 4, device="{device}"), 0.3)
        except TypeError:
            print(len(twin.cache.companion.host._in_flight.begun))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("is_own", [True, False], ids=["own stream", "default stream"])
def test_python_does_not_wait_for_either_engine(no_calls, is_own):
    """Two layers are enqueued behind a sleeping device; the CPU's part begins after it woke."""
    with torch.cuda.stream(torch.cuda.Stream() if is_own else torch.cuda.default_stream()):
        twin = Twin(build(share=0.5, device="cuda"))
        twin.append(30)
        queries = torch.randn(2, 2, 4, 1, 4, device="cuda")
        expected = [whole(twin, i, queries[i], 0.3) for i in range(2)]
        for i in range(2):
            attend(twin.cache, i, queries[i], 0.3)  # buffers are made once
        torch.cuda.synchronize()
        host, views = twin.cache.companion.host, [twin.cache.views(i).unpinned for i in range(2)]
        torch.cuda._sleep(_SLEEP_CYCLES)
        awake = torch.cuda.Event()
        awake.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for i in range(2):
                question = host_jobs.Question(
                    query=queries[i], softmax_scale=0.3, query_start=29, key_mask=None, mask=None
                )
                host.begin(question, views[i])()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not awake.query()
        torch.cuda.synchronize()
        for i in range(2):
            found = attend(twin.cache, i, queries[i], 0.3)
            torch.testing.assert_close(found, expected[i], atol=1e-5, rtol=1e-5)


def test_the_next_step_may_be_asked_before_this_one_is_answered(device, no_calls):
    """Many steps in one go, each layer's tokens new: no buffer is used twice at a time."""
    twin = Twin(build(share=0.5, device=device))
    twin.append(33)
    if device == "cuda":
        torch.cuda._sleep(_SLEEP_CYCLES)
    answers = []
    for _ in range(6):
        for layer_idx in range(2):
            key, value = new_tokens(twin.cache, 1)
            twin.cache.append(layer_idx, key, value)
            twin.note(layer_idx, key, value)
            answers.append(step(twin, layer_idx))
    for found, expected in answers:
        torch.testing.assert_close(found, expected, atol=TOLERANCE[torch.float32], rtol=1e-5)
