"""What a machine can move and compute, and the costs of attention that follow from it.

One profile serves every model: what differs between models is how many products each byte of keys
and values takes, and which of two limits binds then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from sparsekv.checks import check_positive_int, check_rate, check_seconds
from sparsekv.errors import LayoutError
from sparsekv.roofline.cost_model import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Rates and sizes of one machine: measured, or from `sparsekv.roofline.PRESETS`.

    Rates are in 1e9 bytes/s of what is read or copied, products in 1e12 operations/s (a product
    and its sum are two). Both rates of a decode step hold while the other engine works too: they
    share the memory.

    Raises:
        LayoutError: a rate that is zero, negative or not finite, a size that is no whole number of
            at least 1, or an overhead that is no number of seconds.
    """

    name: str
    """For people: the GPU, the CPU and its cores."""
    cpu_read_gbs: float
    """Attention on the CPU where memory is its limit, while the GPU reads from it too."""
    cpu_tflops: float
    """Attention on the CPU where its products are the limit."""
    cpu_shared_kv_tflops: float | None = None
    """The same where values are part of the keys, so that kernels load each element once for both
    products and for all heads (MLA, DeepSeek-V4). None: as `cpu_tflops`.
    """
    h2d_gbs: float
    """Host memory to GPU while the CPU attends: copied or read in place, whichever is faster."""
    d2h_gbs: float
    """GPU to registered host memory, contiguous."""
    direct_read_gbs: float
    """GPU kernels that read registered host memory in place, while the CPU rests."""
    gather_gbs: float
    """The CPU's gather of pieces of 16 KiB into a staging buffer."""
    hbm_gbs: float
    """The GPU's own memory."""
    ram_bytes: int
    """Host memory."""
    vram_bytes: int
    """GPU memory."""
    num_threads: int
    """Threads that attend at these rates."""
    reads_pinned_at_full_speed: bool = True
    """Whether the CPU reads registered memory as fast as any other."""
    cpu_overhead_s: float = 0.0
    """C_cpu of a layer: seconds of the CPU's part that do not grow with the length."""
    gpu_overhead_s: float = 0.0
    """C_gpu of a layer: seconds of the GPU's part that do not grow with the length."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise LayoutError(f"name={self.name!r}: must be some text; say which GPU and CPU it is")
        for name in ("cpu_read_gbs", "h2d_gbs", "d2h_gbs", "direct_read_gbs"):
            check_rate(name, getattr(self, name))
        for name in ("gather_gbs", "hbm_gbs"):
            check_rate(name, getattr(self, name))
        check_rate("cpu_tflops", self.cpu_tflops, "1e12 operations/s")
        if self.cpu_shared_kv_tflops is not None:
            check_rate("cpu_shared_kv_tflops", self.cpu_shared_kv_tflops, "1e12 operations/s")
        for name in ("ram_bytes", "vram_bytes", "num_threads"):
            check_positive_int(name, getattr(self, name), "give what the machine has")
        if not isinstance(self.reads_pinned_at_full_speed, bool):
            raise LayoutError(
                f"reads_pinned_at_full_speed={self.reads_pinned_at_full_speed!r}: must be True or "
                "False; use False if unsure"
            )
        check_seconds("cpu_overhead_s", self.cpu_overhead_s)
        check_seconds("gpu_overhead_s", self.gpu_overhead_s)

    def attention_gbs(self, *, flops_per_byte: float, shared_kv: bool = False) -> float:
        """Keys and values that the CPU attends to, in 1e9 bytes/s: the lower of two limits, what
        memory gives and what the products allow (the roofline of Williams et al., CACM 52:4).

        Args:
            flops_per_byte: see `flops_per_byte` of this module.
            shared_kv: values are part of the keys.
        Raises:
            LayoutError: `flops_per_byte` is zero, negative or not finite.
        """
        check_rate("flops_per_byte", flops_per_byte, "operations per byte of keys and values")
        tflops = self.cpu_tflops
        if shared_kv and self.cpu_shared_kv_tflops is not None:
            tflops = self.cpu_shared_kv_tflops
        return min(self.cpu_read_gbs, 1e3 * tflops / flops_per_byte)

    def cost_model(
        self, *, bytes_per_token: int, flops_per_byte: float, shared_kv: bool = False
    ) -> CostModel:
        """What one layer's attention costs on this machine, for the whole batch.

        Args:
            bytes_per_token: keys and values of one position of every sequence, one layer: batch
                size x `KVGeometry.bytes_per_token_per_layer`.
            flops_per_byte: see `flops_per_byte` of this module.
            shared_kv: values are part of the keys.
        Raises:
            LayoutError: no whole number of bytes, or `flops_per_byte` zero, negative or not finite.
        """
        return CostModel.from_bandwidths(
            bytes_per_token=bytes_per_token,
            cpu_gbs=self.attention_gbs(flops_per_byte=flops_per_byte, shared_kv=shared_kv),
            h2d_gbs=self.h2d_gbs,
            cpu_overhead_s=self.cpu_overhead_s,
            gpu_overhead_s=self.gpu_overhead_s,
        )

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as `json.dumps` takes them."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> MachineProfile:
        """The profile that `to_json` gave; what has a default may be left out.

        Raises:
            LayoutError: no object, a field that is missing or unknown, or a value that is refused.
        """
        if not isinstance(data, Mapping):
            raise LayoutError(
                f"machine profile of type {type(data).__name__}: must be an object with the fields "
                "of MachineProfile; write it with to_json"
            )
        names = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        missing, unknown = sorted(needed - data.keys()), sorted(map(str, data.keys() - names))
        if missing or unknown:
            raise LayoutError(
                f"machine profile that lacks {missing} and has {unknown} besides: must have the "
                "fields of MachineProfile and no other; write it with to_json"
            )
        return cls(**data)


def flops_per_byte(
    *, num_heads: int, head_dim: int, head_dim_v: int, bytes_per_token: int
) -> float:
    """Operations of decode attention for each byte of keys and values that it reads.

    Two for each query head and element of a key, two for each of a value. In bfloat16: the query
    heads of a kv head for GQA (Qwen3-30B-A3B 8, Mixtral 4), 30.2 for MLA with 16 heads of 576 and
    512, 128 for DeepSeek-V4's 64 heads of 512.

    Args:
        num_heads: query heads.
        head_dim: elements of a key.
        head_dim_v: elements of a value.
        bytes_per_token: keys and values of one token, one layer, all kv heads, as they are stored:
            `KVGeometry.bytes_per_token_per_layer`.
    Raises:
        LayoutError: a count that is no whole number of at least 1.
    """
    remedy = "take it from the model's config"
    check_positive_int("num_heads", num_heads, remedy)
    check_positive_int("head_dim", head_dim, remedy)
    check_positive_int("head_dim_v", head_dim_v, remedy)
    check_positive_int("bytes_per_token", bytes_per_token, remedy)
    return 2 * num_heads * (head_dim + head_dim_v) / bytes_per_token
