"""Threads of the native library: how many, and on which cores."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from native_process import run_python

from sparsekv.kernels import cpu
from sparsekv.kernels.cpu import library
from sparsekv.regions import control_groups

# For each step, the number of threads and the processors that each may use.
REPORT = """
import json, os, pathlib, time
from sparsekv.kernels import cpu
from sparsekv.kernels.cpu import library

def processors():  # of the threads that have their names: they are pinned by then
    found = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("sparsekv-"):
            found[int(name[9:])] = sorted(os.sched_getaffinity(int(task.name)))
    return [found[i] for i in sorted(found)]

reports = []
for mask, num_threads in STEPS:
    os.sched_setaffinity(0, mask)
    if num_threads != "as before":
        library.set_num_threads(num_threads)
    count = cpu.backend().num_threads
    while len(processors()) != count:
        time.sleep(0.01)
    reports.append(processors())
print(json.dumps(reports))
"""


@pytest.fixture(autouse=True)
def native_library() -> None:
    if library.native_library() is None:
        pytest.skip(f"no native library: {cpu.backend().reason}")


def physical_cores() -> list[list[int]]:
    """Processors of each core that this process may use."""
    cores: dict[str, list[int]] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        name = siblings.read_text() if siblings.exists() else str(processor)
        cores.setdefault(name, []).append(processor)
    return list(cores.values())


def reports(*steps: Any, **environment: str) -> list[list[list[int]]]:
    done = run_python(REPORT.replace("STEPS", repr(steps)), **environment)
    assert done.stderr == ""
    found: list[list[list[int]]] = json.loads(done.stdout)
    return found


def test_threads_are_pinned_to_cores_of_the_mask_at_their_start() -> None:
    cores = physical_cores()
    everything = sorted(os.sched_getaffinity(0))
    last = cores[-1]
    found = reports(
        (everything, len(cores)),
        (last, "as before"),
        (last, None),  # the default: one core, so one thread
        (last, 3),  # more than cores: not pinned
        (everything, 1),
        (everything, len(cores) + 1),
    )
    assert found == [
        cores,
        cores,
        [last],
        [last] * 3,
        cores[:1],
        [everything] * (len(cores) + 1),
    ]


def default_threads(cores: int) -> int:
    limit = control_groups.cpu_limit()
    granted = cores if limit is None else min(cores, max(1, int(limit)))
    return max(1, granted - 1)


@pytest.mark.parametrize("openmp", ["1", "3"])
def test_the_default_leaves_one_core_to_others_whatever_openmp_is_told(openmp: str) -> None:
    cores = physical_cores()
    step = (sorted(os.sched_getaffinity(0)), None)
    ((*threads,),) = reports(step, OMP_NUM_THREADS=openmp)
    assert threads == cores[: default_threads(len(cores))]
