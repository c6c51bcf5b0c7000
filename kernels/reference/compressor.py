"""DeepSeek-V4's compressors: windows of tokens become one entry each, by a softmax per channel.

The same function makes the entries of CSA (windows of 4, overlapping), of its indexer, and of HCA
(windows of 128). It works window by window in plain torch and takes memory in proportion to its
input, so the definition is also the implementation for every device. Projections before it,
rotation and quantisation after it, and tokens that do not fill a window are the caller's business.

Letters: B batch, N windows, R ratio, D dim of an entry, W width of the projections (D or 2 D).
"""

import torch
from torch import Tensor

from sparsekv.errors import LayoutError


def compress(
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    norm_weight: Tensor,
    *,
    ratio: int,
    eps: float,
    prior_kv: Tensor | None = None,
    prior_gate: Tensor | None = None,
) -> Tensor:
    """Compress each window of `ratio` tokens into one entry.

    Without overlap (HCA; DeepSeek-V4, equations 20-23), per channel over the window's tokens t:

        p = softmax(gate_t + bias_slot(t));  entry = RMSNorm(sum of p_t * kv_t) * norm_weight

    With overlap (CSA; equations 9-12) a token carries two series, a in its first D channels and b
    in its last D, and entry i takes 2 * ratio slots: series a of window i - 1, then series b of
    window i. The window before the first one of a sequence has kv 0 and gate -inf: weight 0.
    There is overlap exactly if kv is twice as wide as norm_weight.

    Args:
        kv: (batch, num_windows * ratio, dim or 2 * dim), floating: whole windows, in order.
        gate: like `kv`: logits, without the bias.
        position_bias: (ratio, dim or 2 * dim), floating: added to the gate by slot in the window.
        norm_weight: (dim,), floating.
        ratio: tokens of a window.
        eps: added to the mean square under RMSNorm's root.
        prior_kv: (batch, ratio, dim): series a of the window before the first one here; None at
            the start of a sequence, and always None without overlap.
        prior_gate: likewise, its gate with the bias already in it; given with prior_kv or not at
            all. `carried_series` makes the two.

    Returns:
        (batch, num_windows, dim), not rotated, float64 for a float64 kv, else float32: softmax,
        sum and norm are in that dtype. num_windows may be 0. A NaN in a window reaches its own
        entry and, by series a, the next one; no other.

    Raises:
        LayoutError: shapes that break the rules above.
    """
    dim = norm_weight.shape[0]
    has_overlap = kv.shape[-1] == 2 * dim
    _check_windows(kv, gate, position_bias, ratio)
    if not has_overlap and kv.shape[-1] != dim:
        raise LayoutError(
            f"kv {tuple(kv.shape)} does not fit norm_weight ({dim},): it is {dim} wide, or "
            f"{2 * dim} with overlap; pass the projections of the same compressor"
        )
    _check_prior(prior_kv, prior_gate, (kv.shape[0], ratio, dim), has_overlap)

    values, logits = _windows(kv, gate, position_bias, ratio)  # [B, N, R, W]
    if has_overlap:
        values = _overlapping(values, prior_kv, 0.0)  # [B, N, 2 R, D]
        logits = _overlapping(logits, prior_gate, -torch.inf)
    pooled = (torch.softmax(logits, dim=2) * values).sum(dim=2)  # [B, N, D]
    mean_square = pooled.square().mean(dim=-1, keepdim=True)
    return pooled * torch.rsqrt(mean_square + eps) * norm_weight.to(pooled.dtype)


def carried_series(kv: Tensor, gate: Tensor, position_bias: Tensor) -> tuple[Tensor, Tensor]:
    """What `compress` with overlap needs of the windows before: prior_kv and prior_gate.

    A call without a whole window changes nothing: what it was given is carried on.

    Args:
        kv, gate, position_bias: as given to `compress`; at least one window.

    Returns:
        Series a of the last window, and its gate with the bias added: (batch, ratio, dim) each,
        float64 for a float64 kv, else float32 (exact for narrower input). Copies: they keep no
        larger tensor alive.

    Raises:
        LayoutError: no window, or shapes that break the rules of `compress`.
    """
    ratio, width = position_bias.shape
    _check_windows(kv, gate, position_bias, ratio)
    if kv.shape[1] == 0:
        raise LayoutError("kv has no window: carry on what was carried before")
    values, logits = _windows(kv[:, -ratio:], gate[:, -ratio:], position_bias, ratio)
    dim = width // 2
    return values[:, 0, :, :dim].clone(), logits[:, 0, :, :dim].clone()


def _windows(kv: Tensor, gate: Tensor, position_bias: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """Values and biased logits by window: (batch, num_windows, ratio, width) each."""
    dtype = torch.float64 if kv.dtype == torch.float64 else torch.float32
    shape = (kv.shape[1] // ratio, ratio)
    logits = gate.to(dtype).unflatten(1, shape) + position_bias.to(dtype)
    return kv.to(dtype).unflatten(1, shape), logits


def _overlapping(windows: Tensor, prior: Tensor | None, absent: float) -> Tensor:
    """Series a of the window before, then series b of the window itself, along the slots."""
    series_a, series_b = windows.chunk(2, dim=-1)  # [B, N, R, D]
    if prior is None:
        first = series_a.new_full((series_a.shape[0], 1, *series_a.shape[2:]), absent)
    else:
        first = prior[:, None].to(windows.dtype)
    previous = torch.cat([first, series_a], dim=1)[:, : windows.shape[1]]
    return torch.cat([previous, series_b], dim=2)


def _check_windows(kv: Tensor, gate: Tensor, position_bias: Tensor, ratio: int) -> None:
    if gate.shape != kv.shape:
        raise LayoutError(
            f"gate {tuple(gate.shape)} does not fit kv {tuple(kv.shape)}: both have the same "
            "shape; pass the two projections of the same tokens"
        )
    if position_bias.shape != (ratio, kv.shape[-1]):
        raise LayoutError(
            f"position_bias {tuple(position_bias.shape)}: must be (ratio, width of kv) = "
            f"({ratio}, {kv.shape[-1]}); pass that of the same compressor"
        )
    if kv.shape[1] % ratio:
        raise LayoutError(
            f"kv has {kv.shape[1]} tokens: must be whole windows of ratio={ratio}; keep the last "
            f"{kv.shape[1] % ratio} for the next call"
        )


def _check_prior(
    prior_kv: Tensor | None,
    prior_gate: Tensor | None,
    shape: tuple[int, int, int],
    has_overlap: bool,
) -> None:
    if (prior_kv is None) != (prior_gate is None):
        raise LayoutError(
            "one of prior_kv and prior_gate is None: they are two halves of one state; pass both "
            "or neither"
        )
    if prior_kv is None or prior_gate is None:
        return
    if not has_overlap:
        raise LayoutError(
            "prior_kv is given, but kv is as wide as norm_weight: windows without overlap need "
            "nothing of the one before; pass None"
        )
    for name, prior in (("prior_kv", prior_kv), ("prior_gate", prior_gate)):
        if prior.shape != shape:
            raise LayoutError(
                f"{name} {tuple(prior.shape)}: must be (batch, ratio, dim) = {shape}; pass what "
                "carried_series gave for the same rows"
            )
