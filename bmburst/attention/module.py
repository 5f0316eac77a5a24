"""`BurstAttention`: attention as a BMTrain module."""

from dataclasses import fields, replace
from typing import Any

import bmtrain as bmt
from torch import Tensor

from bmburst.attention.api import attend, resolve_group
from bmburst.attention.options import AttentionOptions, MaskOption
from bmburst.mesh import current_mesh


class BurstAttention(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Exact attention over a sequence split over ranks; it has no parameters.

    Args:
        group: See `burst_attention`; None takes the mesh that is current now, else the world at each call.
        options: The keyword arguments of `burst_attention`, except `length`, `key_length`, `sink` and `return_lse`.

    Raises:
        UserError: The value of an option is unknown, or this rank is not in the group.
    """

    def __init__(self, *, group: object = None, **options: Any) -> None:
        super().__init__()
        # A current mesh is looked up now: on a GPU blocks are recomputed in autograd's thread, where none is current.
        self.group = None if group is None and current_mesh() is None else resolve_group(group)
        self.options = AttentionOptions(**options)
        self.options.validate()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        length: int | None = None,
        mask: MaskOption | None = None,
        key_length: int | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Return attention's output.

        Args:
            q: `[batch, local_tokens, heads, head_dim]`.
            k: `[batch, local_tokens, kv_heads, head_dim]`.
            v: Shaped as k.
            length: Real tokens of the whole sequence. Positional: BMTrain's blocks drop late keywords.
            mask: Instead of the one that the module was made with.
            key_length: Real tokens of the keys' sequence, where it is another one than the queries'. Positional.
            sink: See `burst_attention`. Positional.

        Returns:
            Shaped and typed as q.
        """
        options = self.options if mask is None else replace(self.options, mask=mask)
        return attend(q, k, v, length, self.group, options, key_length, sink)[0]

    def extra_repr(self) -> str:
        """Show the options in `print(model)`."""
        return ", ".join(f"{f.name}={getattr(self.options, f.name)!r}" for f in fields(self.options))
