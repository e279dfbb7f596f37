"""The limit of decoding, defined once for `info`, every bench and the report.

A decode step must read every weight that it uses, as it lies in memory (not on the disk), and the
keys and values of every sequence's context. No kernel is faster than those bytes at the bandwidth
of the memory, which is measured by a copy: data sheets promise more than any program gets.

    tokens/s = batch × bandwidth / (weight bytes + batch × context × KV bytes of a token)

Which weights: all linears and the head (of a mixture of experts those that one token is sent to).
Of an embedding that is not the head too, a step looks up a row.
"""

from __future__ import annotations


def offload_limit(
    *, resident_bytes: float, streamed_bytes: float, copy_gb_s: float, bus_gb_s: float
) -> float:
    """Tokens/s of one sequence where some layers come over the bus for each token. Compute hides
    behind the transfers, so the slower of the two is what a step takes.
    """
    return 1e9 / max(resident_bytes / copy_gb_s, streamed_bytes / bus_gb_s)


def decode_limit(
    *,
    weight_bytes: float,
    copy_gb_s: float | None,
    batch: int = 1,
    context: float = 0.0,
    kv_bytes_per_token: float = 0.0,
) -> float | None:
    """Tokens/s of the whole batch; None where the bytes or the bandwidth are not known."""
    if not weight_bytes or not copy_gb_s:
        return None
    return batch * copy_gb_s * 1e9 / (weight_bytes + batch * context * kv_bytes_per_token)
