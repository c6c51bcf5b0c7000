"""What a cache holds, region by region."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionStats:
    """One region, all layers and rows."""

    name: str
    """window, ping-pong, unpinned or pinned."""
    memory: str
    """GPU (the accelerator, also a simulated one) or CPU."""
    tokens: int
    """Tokens of a sequence that live here; 0 for ping-pong, which holds copies."""
    used_bytes: int
    """Bytes of those tokens; for the two accelerator regions the bytes allocated."""
    committed_bytes: int
    """Memory taken: in host memory every page that was ever touched, also those registered ahead
    and those that an earlier cache of the same pool left; on the accelerator the same as used.
    """
    share: float
    """Part of all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareStats:
    """How well a share that balances itself does; seconds of one layer of the latest steps."""

    target_share: float
    """Part of the placed tokens at which both engines would finish together."""
    predicted_s: float
    """What the later engine takes at the share in use, by the costs that are followed."""
    measured_cpu_s: float | None
    """What the CPU took; None: nothing was measured yet."""
    measured_gpu_s: float | None
    """What the accelerator took, beside what it had read ahead, and its overhead as calibrated."""

    def __str__(self) -> str:
        line = f"share aimed at {self.target_share:.1%}; ms a layer: "
        line += f"{1e3 * self.predicted_s:,.3f} predicted"
        for name, seconds in (("CPU", self.measured_cpu_s), ("GPU", self.measured_gpu_s)):
            if seconds is not None:
                line += f", {name} {1e3 * seconds:,.3f} measured"
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A cache at one moment."""

    num_tokens: int
    """Tokens of each sequence."""
    batch_size: int
    cpu_share: float
    """Part of the placed tokens that the CPU attends to; 0.0 while none is placed."""
    placed_share: float
    """Part of them that is unpinned; the rest of `cpu_share` is borrowed from the pinned region."""
    regions: tuple[RegionStats, ...]
    h2d_bytes: int
    """Bytes copied from host memory to the accelerator so far."""
    d2h_bytes: int
    """Bytes copied from the accelerator to host memory so far."""
    borrowed_bytes: int
    """Bytes of the pinned region to which the CPU has attended so far."""
    buffer_bytes: int
    """Host memory, in no region, through which evicted windows, queries and results pass."""
    registered_bytes: int
    """Host memory registered with the accelerator (page-locked) for this cache: the pinned region,
    what is registered ahead for it, and `buffer_bytes`.
    """
    longest_registration_s: float
    """The longest that one registration took, before or between forwards as well as while decoding;
    no kernel can be launched meanwhile. 0.0: none was made.
    """
    balance: ShareStats | None = None
    """Of a share that balances itself; None: it was given."""

    @property
    def host_used_bytes(self) -> int:
        """Bytes of the tokens in host memory."""
        return sum(region.used_bytes for region in self.regions if region.memory == "CPU")

    @property
    def host_committed_bytes(self) -> int:
        """Host memory taken for them, buffers included."""
        regions = [region for region in self.regions if region.memory == "CPU"]
        return self.buffer_bytes + sum(region.committed_bytes for region in regions)

    @property
    def share_summary(self) -> str:
        """The share in use, and what of it is borrowed."""
        summary = f"{self.cpu_share:.1%}"
        if self.cpu_share > self.placed_share:
            borrowed = self.cpu_share - self.placed_share
            summary += f" ({self.placed_share:.1%} unpinned, {borrowed:.1%} borrowed)"
        return summary

    @property
    def host_summary(self) -> str:
        """One line on host memory."""
        mib = 2**20
        line = (
            f"host memory: {self.host_committed_bytes / mib:,.2f} MiB taken for "
            f"{self.host_used_bytes / mib:,.2f} MiB, {self.registered_bytes / mib:,.2f} MiB of it "
            "registered"
        )
        if self.longest_registration_s:
            line += f", {1e3 * self.longest_registration_s:,.1f} ms at most at once"
        return line

    def __str__(self) -> str:
        lines = [f"{'region':<10}{'memory':>8}{'tokens':>10}{'MiB':>12}{'share':>8}"]
        for region in self.regions:
            size = region.used_bytes / 2**20
            lines.append(
                ""
                ""
                f"{region.name:<10}{region.memory:>8}{region.tokens:>10,}{size:>12,.2f}{region.share:>8.1%}"
            )
        rows = f"{self.num_tokens:,} tokens x {self.batch_size} rows"
        lines += [f"{rows}, CPU share of placed tokens {self.share_summary}", self.host_summary]
        if self.balance is not None:
            lines.append(str(self.balance))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindStats:
    """One place where one kind of DeepSeek-V4's layers keeps something: all its layers and rows."""

    kind: str
    """sliding, csa or hca."""
    num_layers: int
    name: str
    """recent tokens, open windows, index keys, entries, or a region of CSA's pool."""
    memory: str
    """GPU (the accelerator, also a simulated one) or CPU."""
    entries: int
    """Raw tokens or compressed entries of a sequence, in each layer."""
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedStats:
    """A DeepSeek-V4 cache at one moment."""

    num_tokens: int
    """Tokens of each sequence."""
    batch_size: int
    kinds: tuple[KindStats, ...]
    pool: CacheStats
    """The four regions of CSA's compressed entries; its tokens are entries."""

    @property
    def cpu_share(self) -> float:
        """Part of the placed entries that the CPU attends to."""
        return self.pool.cpu_share

    def __str__(self) -> str:
        lines = [f"{'layers':<12}{'what':<16}{'memory':>8}{'a layer':>10}{'MiB':>12}"]
        for row in self.kinds:
            layers, size = f"{row.num_layers} {row.kind}", row.used_bytes / 2**20
            lines.append(
                f"{layers:<12}{row.name:<16}{row.memory:>8}{row.entries:>10,}{size:>12,.2f}"
            )
        placed = f"CPU share of placed entries {self.cpu_share:.1%}"
        lines.append(f"{self.num_tokens:,} tokens x {self.batch_size} rows, {placed}")
        lines.append(self.pool.host_summary)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)
