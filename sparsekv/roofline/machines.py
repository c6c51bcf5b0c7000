"""Machines whose figures are known, so that a plan can be made for one that is not at hand.

The hosts of the paper (arXiv:2609.14507) come from its text, and where it states no rate, from the
shares to which its models' routing converges: with p = B / (A + B), the CPU attends at
p / (1 - p) times the rate of the link. Its overheads are not stated; they are 0 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sparsekv.roofline.machine import MachineProfile

_GIB = 2**30

# The paper's links, pinned and contiguous: 25.4 GB/s measured on PCIe 4; on PCIe 3 the writing back
# of 1024 tokens of a layer, 32 sequences, takes 2.9 to 10.3 ms for 37.7 to 134.2 MB.
_PCIE4_GBS = 25.4
_PCIE3_GBS = 13.0
# What the H200 host's kernels read in place of what copies bring, 51.3 of 55.4 GB/s, for hosts
# where nobody measured it.
_IN_PLACE = 0.926


def _gbs_at_share(marginal_share: float) -> float:
    """The CPU's rate on the A100 host, by the share to which a model's routing converges there."""
    return _PCIE4_GBS * marginal_share / (1 - marginal_share)


def _of_the_paper(name: str, *, link_gbs: float, hbm_gbs: float) -> MachineProfile:
    """A host of the paper: one Xeon Gold 5318Y without AMX (24 cores) and 502 GB, a GPU with 32."""
    return MachineProfile(
        name=name,
        # Mixtral converges to 0.75, the most of all models: 76.2 GB/s at 4 operations a byte.
        cpu_read_gbs=_gbs_at_share(0.75),
        # Qwen3-30B-A3B converges to 0.625: 42.3 GB/s at 8 operations a byte.
        cpu_tflops=_gbs_at_share(0.625) * 8 / 1e3,
        # DeepSeek-V2-Lite converges to 0.50: 25.4 GB/s at 30.2 operations a byte. One limit for all
        # three would give it 11 GB/s: its kernel uses each latent for 16 heads.
        cpu_shared_kv_tflops=_gbs_at_share(0.50) * (2 * 16 * (576 + 512) / 1152) / 1e3,
        h2d_gbs=link_gbs,
        d2h_gbs=link_gbs,  # 1024 tokens written back in 1.5 to 5.3 ms on PCIe 4
        direct_read_gbs=link_gbs * _IN_PLACE,
        gather_gbs=35.1,  # block copies from DRAM to DRAM, section on sparse selection
        hbm_gbs=hbm_gbs,
        ram_bytes=502 * 10**9,
        vram_bytes=32 * _GIB,  # the A100 is capped to what the V100 has
        num_threads=24,
        reads_pinned_at_full_speed=False,  # 10 to 25 % slower beyond 8K tokens
    )


PRESETS: Mapping[str, MachineProfile] = MappingProxyType(
    {
        # The GPUs' own memory: NVIDIA's data sheets of the A100 (40 GB, PCIe) and the V100.
        "a100": _of_the_paper(
            "NVIDIA A100 (32 GB, PCIe 4), Xeon Gold 5318Y, 24 cores",
            link_gbs=_PCIE4_GBS,
            hbm_gbs=1555.0,
        ),
        "v100": _of_the_paper(
            "NVIDIA V100 (32 GB, PCIe 3), Xeon Gold 5318Y, 24 cores",
            link_gbs=_PCIE3_GBS,
            hbm_gbs=900.0,
        ),
        # Each number from benchmarks/results/*_h200-16core_*.json, by the name of the topic.
        "h200": MachineProfile(
            name="NVIDIA H200 (PCIe 5), Xeon with AMX, 16 cores",
            # ceilings, reading and copying together, 15 threads: 108.9 + 43.6 GB/s. Decode steps
            # get there: 102 and 117 for Qwen3 at shares 0.7 and 0.75; from the host 43.8 at 0.65.
            cpu_read_gbs=108.9,
            h2d_gbs=43.6,
            # cpu_attention, DeepSeek-V4 by AMX, 15 threads: 82.2 GB/s at 128 operations a byte.
            cpu_tflops=10.52,
            d2h_gbs=55.2,  # ceilings
            direct_read_gbs=51.3,  # gpu_attention, from the host
            gather_gbs=69.6,  # cpu_gather, 16 KiB, 15 threads
            hbm_gbs=4234.0,  # ceilings, a copy's reads and writes
            ram_bytes=135_148_564_480,
            vram_bytes=141 * 10**9,  # NVIDIA's data sheet
            num_threads=15,
            # share_tracking, Qwen3: calibrated in decode steps.
            cpu_overhead_s=68e-6,
            gpu_overhead_s=79e-6,
        ),
    }
)
"""By name: "a100" and "v100", the paper's hosts, and "h200", that of this project's benchmarks."""
