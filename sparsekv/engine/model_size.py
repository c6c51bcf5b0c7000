"""How large a model is: what it stores for each token, and its weights, counted by what reads them.

Numbers only. Where they come from, a configuration or a known name, is left to others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from sparsekv.checks import check_positive_int
from sparsekv.errors import LayoutError
from sparsekv.format import KVGeometry
from sparsekv.format.compressed import CompressedGeometry
from sparsekv.roofline import CostModel, MachineProfile, flops_per_byte

Geometry = KVGeometry | CompressedGeometry
"""The second for DeepSeek-V4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCounts:
    """Parameters of all layers, by kind. A tied output head counts once, as the embedding.

    Raises:
        LayoutError: a count that is not a whole number, 0 or more.
    """

    attention: int
    """Projections, and what compresses and indexes."""
    experts: int
    """Routed experts, all of them; shared ones are in `feed_forward`."""
    feed_forward: int
    """Dense layers, shared experts and routers."""
    embedding: int
    """Input embedding: a step reads a row of it for each token, or all of it as a tied head."""
    head: int
    """Output head; 0: tied to the embedding."""
    other: int
    """Norms, and what mixes residual streams."""

    def __post_init__(self) -> None:
        for field in fields(self):
            count = getattr(self, field.name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise LayoutError(
                    f"{field.name}={count!r}: must be a number of parameters, 0 or more; count "
                    "them in the model"
                )

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def read_by_any_step(self) -> int:
        """Parameters that a step reads whatever the batch: routed experts and rows of the embedding
        apart.
        """
        is_tied = self.head == 0
        return self.total - self.experts - (0 if is_tied else self.embedding)

    def as_dict(self) -> dict[str, int]:
        """The counts as JSON holds them."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a plan needs to know of a model.

    Raises:
        LayoutError: experts without weights, or a token that uses more experts than there are.
    """

    name: str
    geometry: Geometry
    num_heads: int
    """Query heads of a layer."""
    weights: WeightCounts
    num_experts: int = 0
    """Routed experts of a layer; 0: the model has none."""
    experts_per_token: int = 0
    """How many of them a token uses."""
    selected_entries: int | None = None
    """Most compressed entries that a query attends to; None: it attends to every token."""

    def __post_init__(self) -> None:
        check_positive_int("num_heads", self.num_heads, "take it from the model's config")
        if not 0 <= self.experts_per_token <= self.num_experts:
            raise LayoutError(
                f"experts_per_token={self.experts_per_token}: must be from 0 to "
                f"num_experts={self.num_experts}; take both from the model's config"
            )
        if (self.num_experts == 0) != (self.weights.experts == 0):
            raise LayoutError(
                f"num_experts={self.num_experts} with {self.weights.experts} parameters of "
                "experts: both are 0 or neither; take both from the model's config"
            )

    @property
    def attended(self) -> KVGeometry:
        """What the two engines share: keys and values of the layers with full attention, or the
        entries of DeepSeek-V4's CSA layers.
        """
        geometry = self.geometry
        return geometry if isinstance(geometry, KVGeometry) else geometry.pool_geometry

    @property
    def tokens_per_entry(self) -> int:
        """Tokens that one position of `attended` stands for."""
        return 1 if isinstance(self.geometry, KVGeometry) else self.geometry.csa_ratio

    @property
    def attention_flops_per_byte(self) -> float:
        """Floating-point operations of attention for each byte of `attended`."""
        geometry, attended = self.geometry, self.attended
        return flops_per_byte(
            num_heads=self.num_heads,
            head_dim=geometry.head_dim,  # entries may be packed; what is multiplied is not
            head_dim_v=attended.value_dim if geometry is attended else geometry.head_dim,
            bytes_per_token=attended.bytes_per_token_per_layer,
        )

    def cost_on(self, machine: MachineProfile, batch_size: int) -> CostModel:
        """What one layer's attention costs on a machine, by its rates; per position of `attended`.

        Raises:
            LayoutError: a batch size that is not a positive whole number.
        """
        check_positive_int("batch_size", batch_size, "a run needs at least one sequence")
        return machine.cost_model(
            bytes_per_token=batch_size * self.attended.bytes_per_token_per_layer,
            flops_per_byte=self.attention_flops_per_byte,
            shared_kv=self.attended.shared_kv,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in the geometry's dtype."""
        return self.weights.total * self.geometry.dtype.itemsize

    @property
    def expert_bytes(self) -> int:
        """Bytes of the routed experts."""
        return self.weights.experts * self.geometry.dtype.itemsize

    def used_experts(self, batch_size: int) -> float:
        """Experts of a layer that a step of `batch_size` tokens uses, on average, if every expert
        is as likely as any other.
        """
        if not self.num_experts:
            return 0.0
        unused = (1.0 - self.experts_per_token / self.num_experts) ** batch_size
        return self.num_experts * (1.0 - unused)

    def weight_bytes_read(self, batch_size: int) -> int:
        """Bytes of weights that a step of `batch_size` tokens reads, once each."""
        experts = 0.0
        if self.num_experts:
            experts = self.weights.experts * self.used_experts(batch_size) / self.num_experts
        return round((self.weights.read_by_any_step + experts) * self.geometry.dtype.itemsize)
