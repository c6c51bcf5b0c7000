"""`sparsekv doctor` where there is a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsekv.device import open_accelerator
from sparsekv.machine import link
from sparsekv.machine.gpu import probe_gpu
from sparsekv.machine.kernels import probe_gpu_kernels
from sparsekv.machine.link import measure_copies, probe_link

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROOT = Path(__file__).parent.parent

# Registers 64 MiB under a limit of 64 KiB of locked memory that binds mlock, and copies from there.
UNDER_A_LIMIT = """
import ctypes, os, resource, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK: root loses it with the next program
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.execv(sys.executable, [sys.executable, "-c", '''
import ctypes, mmap, sys
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.mmap(-1, 1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(1 << 20)) == 0:
    sys.exit("no limit binds here")
from sparsekv.device import open_accelerator
from sparsekv.machine.link import measure_copies
rate = measure_copies(open_accelerator("cuda"))
assert rate.gbs is not None, rate.refusal
print("registered")
'''])
"""


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )


def doctor(code: int = 0, **environ: str) -> dict[str, Any]:
    done = run("-m", "sparsekv.cli.main", "doctor", "--json", **environ)
    assert done.returncode == code, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def of_topic(result: dict[str, Any], topic: str) -> list[dict[str, Any]]:
    return [finding for finding in result["findings"] if finding["topic"] == topic]


def test_the_device_is_torchs() -> None:
    gpu = probe_gpu()
    assert gpu.device is not None
    assert gpu.device.name == torch.cuda.get_device_name()
    assert 0 < gpu.device.free_bytes <= gpu.device.total_bytes
    assert gpu.cuda == torch.version.cuda


def test_the_kernels_answer() -> None:
    kernels = probe_gpu_kernels(torch.device("cuda", torch.cuda.current_device()))
    assert kernels.error == ""
    assert kernels.is_triton == (kernels.triton_error == "")


def test_copies_are_measured_and_the_device_has_a_place_on_the_bus() -> None:
    accelerator = open_accelerator("cuda")
    found = probe_link(accelerator)
    assert found.copy.gbs is not None
    assert found.copy.gbs > 0
    bus_id = link._bus_id(accelerator)
    assert bus_id is not None
    assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", bus_id)


def test_measuring_twice_leaves_nothing_behind() -> None:
    accelerator = open_accelerator("cuda")
    measure_copies(accelerator)
    before = torch.cuda.memory_allocated()
    measure_copies(accelerator)
    assert torch.cuda.memory_allocated() == before
    torch.ones(8, device="cuda").sum().item()


def test_the_limit_of_locked_memory_does_not_bind_registration() -> None:
    done = run("-c", UNDER_A_LIMIT)
    if "no limit binds here" in done.stderr:
        pytest.skip("this system lets the process lock what it likes")
    assert (done.returncode, done.stdout) == (0, "registered\n"), done.stderr


def test_the_report_tells_gpu_kernels_and_link() -> None:
    result = doctor()
    for topic in ("GPU", "GPU kernels", "PCIe"):
        assert of_topic(result, topic), topic
    assert torch.cuda.get_device_name() in of_topic(result, "GPU")[0]["text"]
    assert "GB/s to the GPU" in of_topic(result, "PCIe")[0]["text"]


def test_a_hidden_gpu_is_a_note() -> None:
    (said,) = of_topic(doctor(CUDA_VISIBLE_DEVICES=""), "GPU")
    assert said["level"] == "note"


def test_triton_without_a_c_compiler_must_be_fixed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    nothing = str(tmp_path / "nothing")
    result = doctor(code=1, PATH=nothing, CC="/no/compiler", TRITON_CACHE_DIR=nothing)
    (said,) = of_topic(result, "GPU kernels")
    assert said["level"] == "must fix"
