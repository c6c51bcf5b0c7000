"""`generate` by many threads at once, broken off at any moment, and where memory is short: right
answers, a device in order, nothing kept. Each on the simulated accelerator, and on CUDA.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil
import pytest
import torch
from harness import seconds_to_synchronize
from model_zoo import build, needs_cuda, same_tokens

from sparsekv import CapacityError
from sparsekv.device import CudaAccelerator
from sparsekv.models import compat

OPTIONS: dict[str, Any] = {"max_new_tokens": 15, "do_sample": False}
_MOST_S = 1.0
"""That a device works on for what a step leaves behind."""


def random_ids(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(1, 90, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("device", "num_threads", "is_own"),
    [
        ("cpu", 4, False),
        pytest.param("cuda", 24, False, marks=needs_cuda),
        pytest.param("cuda", 24, True, marks=needs_cuda),
    ],
    ids=["cpu", "cuda, one stream", "cuda, own streams"],
)
def test_threads_generating_at_once_get_the_answers_of_one(
    make_patched: Callable[..., Any], device: str, num_threads: int, is_own: bool
) -> None:
    plain = build("qwen3_moe").to(device)
    model = make_patched("qwen3_moe", cpu_share=0.5).model.to(device)
    prompts = [random_ids(1 + i % 3, 9 + i, seed=i).to(device) for i in range(num_threads)]
    expected = [plain.generate(prompt, **OPTIONS) for prompt in prompts]
    seconds_to_synchronize()
    failures: list[object] = []

    def work(which: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if is_own else nullcontext():
                got = model.generate(prompts[which], **OPTIONS)
                if not torch.equal(got, expected[which]):
                    failures.append((which, got.tolist(), expected[which].tolist()))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:3]


@contextmanager
def ctrl_c_after(seconds: float) -> Iterator[None]:
    """KeyboardInterrupt in this thread, wherever it is by then; none once the block has ended."""

    def strike(*arguments: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_ctrl_c_at_any_moment_leaves_device_and_model_in_order(
    make_patched: Callable[..., Any], device: str, share: float
) -> None:
    num_points = 5 if device == "cpu" else 12
    plain = build("qwen3_moe").to(device)
    model = make_patched("qwen3_moe", cpu_share=share).model.to(device)
    prompt = random_ids(3, 17, seed=0).to(device)
    expected = plain.generate(prompt, **OPTIONS)
    model.generate(prompt, **OPTIONS)  # compiles
    seconds_to_synchronize()
    start = time.perf_counter()
    model.generate(prompt, **OPTIONS)
    seconds_to_synchronize()
    whole = time.perf_counter() - start
    num_struck = 0
    for i in range(num_points):
        try:
            with ctrl_c_after(whole * (i + 0.5) / num_points):
                model.generate(prompt, **OPTIONS)
        except KeyboardInterrupt:
            num_struck += 1
        assert seconds_to_synchronize() < _MOST_S
        assert torch.equal(model.generate(prompt, **OPTIONS), expected)
    assert num_struck


def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Addresses and bytes that are registered with CUDA from here on, and not given back."""
    found: dict[int, int] = {}
    register, unregister = CudaAccelerator.register, CudaAccelerator.unregister

    def note(self: CudaAccelerator, address: int, num_bytes: int) -> None:
        register(self, address, num_bytes)
        found[address] = num_bytes

    def forget(self: CudaAccelerator, address: int) -> None:
        unregister(self, address)
        found.pop(address, None)

    monkeypatch.setattr(CudaAccelerator, "register", note)
    monkeypatch.setattr(CudaAccelerator, "unregister", forget)
    return found


def test_caches_that_are_made_used_and_dropped_leave_nothing(
    make_patched: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is dropped while the device still works for it: nobody waits in between."""
    num_cycles = 30 if device == "cpu" else 100
    found = registered(monkeypatch)
    patched = make_patched("llama", cpu_share=0.5)
    model, prompt = patched.model.to(device), random_ids(3, 30, seed=0).to(device)

    def cycle() -> None:
        cache = patched.new_cache()
        with torch.no_grad():
            model(prompt, **{compat.CACHE_KW: cache})
            for i in range(3):
                model(prompt[:, i : i + 1], **{compat.CACHE_KW: cache})

    def state() -> tuple[int, int, int]:
        gc.collect()
        seconds_to_synchronize()
        on_device = 0 if device == "cpu" else torch.cuda.memory_allocated(device)
        return psutil.Process().memory_info().rss, sum(found.values()), on_device

    for _ in range(20):
        cycle()
    rss, pinned, on_device = state()
    for _ in range(num_cycles):
        cycle()
    rss_after, pinned_after, on_device_after = state()
    assert rss_after - rss < 16 << 20
    assert pinned_after <= 1.5 * pinned  # idle, for the next cache: how much depends on timing
    assert on_device_after <= on_device
    patched.restore()
    del cycle
    gc.collect()
    assert sum(found.values()) == 0


def test_without_host_memory_the_error_says_so_and_the_model_goes_on(
    make_patched: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build("qwen3_moe").to(device)
    model = make_patched("qwen3_moe").model.to(device)
    prompt = random_ids(3, 17, seed=0).to(device)
    with monkeypatch.context() as patch:
        patch.setenv("SPARSEKV_HOST_MEMORY", "1MiB")
        with pytest.raises(CapacityError, match="GiB"):
            model.generate(prompt, **OPTIONS)
        seconds_to_synchronize()
    same_tokens(plain, model, prompt, **OPTIONS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_without_device_memory_torch_says_so_and_the_model_goes_on(
    make_patched: Callable[..., Any],
) -> None:
    plain = build("llama").cuda()
    model = make_patched("llama", window_size=4096, ping_pong_tokens=4096).model.cuda()
    prompt = random_ids(3, 17, seed=0).cuda()
    same_tokens(plain, model, prompt, **OPTIONS)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (128 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):  # three windows of 96 MiB
            model.generate(random_ids(96, 17, seed=1).cuda(), **OPTIONS)
        seconds_to_synchronize()
        same_tokens(plain, model, prompt[:1], **OPTIONS)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    same_tokens(plain, model, prompt, **OPTIONS)
