"""`BurstAttention`: attention as a BMTrain module."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst.attention.api import attend, resolve_group
from bmburst.attention.options import AttentionOptions, MaskOption
from bmburst.comm.groups import bmtrain_pipe_degree
from bmburst.errors import UserError, require_known
from bmburst.mesh import current_mesh
from bmburst.schedule.documents import Documents
from bmburst.schedule.layout import Contiguous
from bmburst.schedule.mask import Causal, Mask, SlidingWindow
from bmburst.schedule.ring_schedule import tiles
from bmburst_ops.flash import BackwardInputs, Scoring

_LATE = ("length", "key_length", "sink")
_FEW = 1024  # tokens: compiled kernels work for any number, but a single block of queries may select another kernel


class BurstAttention(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Exact attention over a sequence split over ranks; it has no parameters.

    Args:
        group: See `burst_attention`. None: the mesh that is current at construction, else the world at each call.
        options: The keyword arguments of `burst_attention`, except `length`, `key_length`, `sink` and `return_lse`.

    Raises:
        UserError: An option or its value is unknown, or this rank is not in the group.
    """

    def __init__(self, *, group: object = None, **options: Any) -> None:
        super().__init__()
        _require_options(options)
        # Look up the current mesh now: on a GPU, recompute runs in autograd's thread, where no mesh is current.
        self.group = None if group is None and current_mesh() is None else resolve_group(group)
        self.options = AttentionOptions(**options)
        self.options.validate()
        self.masks_are_own = False
        """Whether the mask of a call is that of its rows also in a pipeline; set by what moves masks with rows."""

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
            v: `[batch, local_tokens, kv_heads, value_dim]`.
            length: Real tokens of the whole sequence. Positional: BMTrain's blocks drop late keywords.
            mask: Replaces the module's mask.
            key_length: Real tokens of the keys' sequence in cross-attention. Positional.
            sink: See `burst_attention`. Positional.

        Returns:
            `[batch, local_tokens, heads, value_dim]`, typed as q.
        """
        if mask is not None and not self.masks_are_own:
            _require_own_rows(mask)
        options = self.options if mask is None else replace(self.options, mask=mask)
        return attend(q, k, v, length, self.group, options, key_length, sink)[0]

    def compile_kernels(
        self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, window: int | None, packed: bool
    ) -> None:
        """Compile the causal kernels by running them on a few tokens of this rank alone.

        FlashAttention-4 takes about 20 seconds to compile forward and backward for each new combination of head
        dimension, mask, GQA ratio and dtype.

        Args:
            heads: Query heads.
            kv_heads: KV heads.
            head_dim: Features per head.
            dtype: Of q, k and v.
            window: Sliding window in tokens, or None.
            packed: Whether batches are packed documents.
        """
        tokens = max(_FEW, 2 * (window or 0))
        mask: Mask = Documents((tokens // 2, tokens - tokens // 2)) if packed else Causal()
        mask = mask if window is None else SlidingWindow(window) & mask
        pattern = tiles(Contiguous(1, tokens), tokens, mask, 0, 0)[0].pattern
        q = torch.zeros(1, tokens, heads, head_dim, device="cuda", dtype=dtype)
        k = torch.zeros(1, tokens, kv_heads, head_dim, device="cuda", dtype=dtype)
        kernel = self.options.kernel_for(mask.needs, q, k, k)
        scoring = Scoring(pattern, 1.0, self.options.softcap)
        lse = kernel.forward(q, k, k, scoring).lse
        given = BackwardInputs(q, q, k, k, lse, torch.zeros_like(lse))
        kernel.backward(given, scoring, deterministic=self.options.deterministic)

    def extra_repr(self) -> str:
        """Show the options in `print(model)`."""
        return ", ".join(f"{f.name}={getattr(self.options, f.name)!r}" for f in fields(self.options))


def _require_own_rows(mask: MaskOption) -> None:
    """Raise UserError for masks of rows in BMTrain's pipeline, which gives them to the rows of all stages."""
    if isinstance(mask, str | Causal | SlidingWindow) or (stages := bmtrain_pipe_degree()) == 1:
        return
    raise UserError(
        f"{type(mask).__name__} as the mask of a call, in BMTrain's pipeline of {stages} stages: BMTrain computes the "
        "rows of other ranks with the mask of this one\nallowed: causal, full, and windows, or one mask of all rows: "
        "BurstAttention(mask=...)\nfix: leave pipe_size out; or bmburst train --pipeline-parallel, for packed documents"
    )


def _require_options(options: Mapping[str, object]) -> None:
    """Refuse what is no option of the module."""
    for name in options:
        if name == "return_lse":
            raise UserError("BurstAttention has no return_lse\nfix: bmburst.burst_attention(..., return_lse=True)")
        if name in _LATE:
            call = "(q, k, v, length, mask, key_length, sink)"
            raise UserError(f"BurstAttention takes {name} at each call\nfix: attention{call}, by position")
        require_known("option of BurstAttention", name, (f.name for f in fields(AttentionOptions)))
