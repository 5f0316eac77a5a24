"""Attention as it runs: decided, then carried out."""

from dataclasses import replace

import torch
from torch import Tensor

from bmburst.attention.call import decide
from bmburst.attention.differentiable import no_autocast
from bmburst.attention.function import SequenceAttention
from bmburst.attention.inputs import require_tensors
from bmburst.attention.options import AttentionOptions
from bmburst.comm.checks import Checked
from bmburst.errors import UserError
from bmburst.schedule.mask import make_mask


def attend(
    q: Tensor, k: Tensor, v: Tensor, length: int | None, comm: Checked, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; see `burst_attention`."""
    if isinstance(options.mask, tuple):
        return _sample_by_sample(q, k, v, length, comm, options)
    call = decide(comm, q, k, v, length, options)
    out, lse = SequenceAttention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return out, lse


def _sample_by_sample(
    q: Tensor, k: Tensor, v: Tensor, length: int | None, comm: Checked, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    masks = options.mask
    assert isinstance(masks, tuple)

    def check() -> tuple[None, str]:
        options.validate()
        require_tensors(q, k, v)  # whole: of a sample's own slices nobody could tell that there were others
        if not masks or len(masks) != len(q):
            raise UserError(f"got {len(masks)} masks for a batch of {len(q)}\ngive one mask, or one to each sample")
        if options.layout == "balanced" and comm.size > 1 and len(set(map(make_mask, masks))) > 1:
            raise UserError("layout 'balanced' is made for one mask, but each sample has its own\nuse layout 'zigzag'")
        return None, f"attention with {len(masks)} masks"

    comm.decided(check)
    parts = [
        attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], length, comm, replace(options, mask=mask))
        for i, mask in enumerate(masks)
    ]
    outs, lses = zip(*parts, strict=True)
    with no_autocast(q.device.type):  # in which torch joins no 16-bit tensors but those of its own dtype
        return torch.cat(outs), torch.cat(lses)
