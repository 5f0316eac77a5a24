"""Attention as it runs: decided, then carried out."""

from torch import Tensor

from bmburst.attention.call import AttentionOptions, decide
from bmburst.attention.function import SequenceAttention
from bmburst.comm.checks import Checked


def attend(
    q: Tensor, k: Tensor, v: Tensor, length: int | None, comm: Checked, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; see `burst_attention`."""
    call = decide(comm, q, k, v, length, options)
    out, lse = SequenceAttention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return out, lse
