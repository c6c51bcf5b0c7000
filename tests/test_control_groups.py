"""What the control groups of this process grant, and how much of it is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_probes import write

from sparsekv.regions import control_groups

UNIFIED = "0::/outer/inner\n"
SPLIT = "5:cpu,cpuacct:/outer/inner\n4:memory:/outer/inner\n1:name=systemd:/\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "cpus"),
    [
        ({"inner/cpu.max": "150000 100000"}, 1.5),
        ({"inner/cpu.max": "max 100000"}, None),
        ({"inner/cpu.max": "max 100000", "cpu.max": "400000 100000"}, 4.0),
        ({"inner/cpu.max": "800000 100000", "cpu.max": "400000 100000"}, 4.0),
        ({"inner/cpu.max": "rubbish"}, None),
        ({"inner/cpu.max": ""}, None),
        ({"inner/cpu.max": "100000 0"}, None),
        ({}, None),
    ],
)
def test_version_2_limits_the_processors(
    tmp_path: Path, groups: dict[str, str], cpus: float | None
) -> None:
    files = {f"sys/fs/cgroup/outer/{name}": text for name, text in groups.items()}
    write(tmp_path, {"proc/self/cgroup": UNIFIED, **files})
    assert control_groups.cpu_limit(tmp_path) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("250000", 2.5), ("-1", None), ("0", None)])
def test_version_1_limits_the_processors(tmp_path: Path, quota: str, cpus: float | None) -> None:
    folder = "sys/fs/cgroup/cpu/outer"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}
    write(tmp_path, {"proc/self/cgroup": SPLIT, **files})
    assert control_groups.cpu_limit(tmp_path) == cpus


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"}
    assert control_groups.cpu_limit(write(tmp_path, files)) == 0.5


@pytest.mark.parametrize(
    ("table", "name", "text", "limit"),
    [
        (UNIFIED, "outer/inner/memory.max", "1073741824", 1 << 30),
        (UNIFIED, "outer/memory.max", "1073741824", 1 << 30),
        (UNIFIED, "outer/memory.max", "max", None),
        (SPLIT, "memory/outer/memory.limit_in_bytes", "1073741824", 1 << 30),
        (SPLIT, "memory/outer/memory.limit_in_bytes", "9223372036854771712", None),
        (SPLIT, "memory/outer/memory.limit_in_bytes", "x", None),
        (SPLIT, "outer/memory.max", "1073741824", None),
        ("5:pids:/outer\n", "memory/outer/memory.limit_in_bytes", "1", None),
        ("rubbish", "memory.max", "1", None),
        ("x:::\n:::\n0::", "memory.max", "1", None),
    ],
)
def test_memory_is_limited_by_any_group_above(
    tmp_path: Path, table: str, name: str, text: str, limit: int | None
) -> None:
    write(tmp_path, {"proc/self/cgroup": table, f"sys/fs/cgroup/{name}": text})
    assert control_groups.memory_limit(tmp_path) == limit


V2 = "sys/fs/cgroup/outer"


def test_the_group_with_the_least_left_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": UNIFIED}
    for group, limit, usage in ((V2, "1000", "700"), (f"{V2}/inner", "max", "600")):
        files |= {f"{group}/memory.max": limit, f"{group}/memory.current": usage}
        files |= {f"{group}/memory.stat": "anon 5\nactive_file 7\ninactive_file 100\n"}
    write(tmp_path, files)
    assert control_groups.memory_left(tmp_path) == 400  # file cache that nobody uses is free
    write(tmp_path, {f"{V2}/inner/memory.max": "750"})
    assert control_groups.memory_left(tmp_path) == 250
    write(tmp_path, {f"{V2}/inner/memory.max": "400"})
    assert control_groups.memory_left(tmp_path) == -100


def test_what_version_1_leaves(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/outer/inner"
    files = {
        "proc/self/cgroup": SPLIT,
        f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{group}/memory.usage_in_bytes": "10\n",
        f"{group}/memory.stat": "inactive_file 30\ntotal_inactive_file 4\n",
    }
    write(tmp_path, files)
    assert control_groups.memory_left(tmp_path) is None
    write(tmp_path, {f"{group}/memory.limit_in_bytes": "50\n"})
    assert control_groups.memory_left(tmp_path) == 44


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/gone\n"},
        {"proc/self/cgroup": UNIFIED, f"{V2}/memory.max": "7", f"{V2}/memory.current": "x"},
    ],
)
def test_groups_that_say_nothing_are_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert control_groups.memory_left(write(tmp_path, files)) is None
