"""New tokens into the window, by definition: copies."""

from torch import Tensor


def append(
    key: Tensor,
    value: Tensor | None,
    window_key: Tensor,
    window_value: Tensor | None,
    offset: int,
    *,
    query: Tensor | None = None,
    stored_query: Tensor | None = None,
) -> None:
    """Write new keys and values into the window from token `offset` on, and the query elsewhere.

    Numbers are converted to the dtype of where they go.

    Args:
        key: (batch, num_kv_heads, num_tokens, head_dim).
        value: (batch, num_kv_heads, num_tokens, head_dim_v); None where it is part of the key.
        window_key: (batch, num_kv_heads, window tokens, head_dim): written in place.
        window_value: likewise, with head_dim_v; None with no `value`.
        offset: token of the window that takes the first new one.
        query: (batch, num_heads, num_tokens, head_dim); None: no query is stored.
        stored_query: shape of `query`, of any floating dtype: written in place.
    """
    places = slice(offset, offset + key.shape[2])
    window_key[:, :, places].copy_(key)
    if value is not None and window_value is not None:
        window_value[:, :, places].copy_(value)
    if query is not None and stored_query is not None:
        stored_query.copy_(query)
