"""The beginning of a sequence as an attention of its own, for results of which only the end is kept.

Under a mask that shows no query a later key, the first tokens of a sequence attend to nothing but themselves: their
results are those of attention over them alone, with 1/4 of the whole's FLOPs for a half, and half of its bytes over the
links (BurstEngine's sequence-level selective checkpointing, arXiv:2509.19836, which has it for striped halves).

What a rank keeps must be the same part on every rank, or the peak does not fall. So it depends on the layout:

- alone on a device: any part;
- striped: any part; the beginning is striped too, and balanced;
- zigzag: the half, which is every rank's second chunk. The first chunks are a contiguous layout of the beginning. Where
  all ranks exchange heads, each has all of its tokens and like work: 1/4 of the whole's. A ring or a gather gives the
  last rank up to twice the mean, so 1/2 of the whole's;
- contiguous, balanced: none. The last ranks would keep everything.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.attention.executor import forward
from bmburst.errors import UserError
from bmburst.recompute.policy import require_end
from bmburst.schedule.layout import Contiguous, Layout, Striped


@dataclass(frozen=True, slots=True)
class Beginning:
    """A `bmburst.recompute.Part` of attention's output and log-sum-exp.

    Attributes:
        call: The attention of the beginning.
        rows: Local tokens in it, on every rank.
        inputs: q, k and v of the whole.
    """

    call: AttentionCall
    rows: int
    inputs: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def before(cls, kept: float, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> "Beginning":
        """Return the beginning behind which a part `kept` of the tokens comes.

        Raises:
            UserError: Layout or mask have no such beginning; on every rank.
        """
        layout = call.layout
        require_end(kept, layout.name, layout.size)
        rows = min(layout.tokens - 1, round((1 - kept) * layout.tokens))
        if rows < 1:
            return cls(call, 0, (q, k, v))
        length = min(call.length, layout.size * rows)
        if int(call.mask.rows(np.array([length - 1]), call.length).stop[0]) > length:
            raise UserError(
                f"mask {call.mask} shows the first {length} tokens later ones: they do not attend alone\n"
                "fix: recompute policy block-keep-attention, or a causal mask"
            )
        return cls(call.over(_first(layout, rows), length), rows, (q, k, v))

    def end(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See `Part.end`."""
        out, lse = results
        return out[:, self.rows :].detach().clone(), lse[:, :, self.rows :].detach().clone()

    def whole(self, end: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See `Part.whole`."""
        out, lse = end
        if not self.rows:
            return out.detach(), lse.detach()
        first = forward(self.call, *(t[:, : self.rows] for t in self.inputs))
        return torch.cat((first.out, out), 1), torch.cat((first.lse, lse), 2)


def _first(layout: Layout, rows: int) -> Layout:
    """Return the layout of the first `rows` local tokens of every rank."""
    return (Striped if isinstance(layout, Striped) else Contiguous)(layout.size, rows)
