"""Trains CPM-Live's CPM-Bee and CPM-Ant on sequences that are split over ranks; docs/cpm_live.md is the guide.

`SplitSequences` gives each rank its part of every batch, and computes the loss. `Attention`, `BucketPositionBias` and
`SegmentPositionEmbedding` replace CPM-Live's modules of the same names, with the same parameters, but without matrices
of all token pairs. Source: CPM-Live (github.com/OpenBMB/CPM-Live), cpm_live/layers/attention.py and
position_embedding.py.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst.amounts import whole_number
from bmburst.attention.biased import BiasedSequence, biased_attention
from bmburst.comm.checks import describe_tensors
from bmburst.errors import UserError, with_fix
from bmburst.integrations.cpm_live_batch import AntPart, BeePart, SplitSequences, SplitTokens
from bmburst_ops.autocast import is_cast_by_autocast
from bmburst_ops.biased import RelativeBias, ant_bias, bee_bias
from bmburst_ops.errors import KernelError

__all__ = [
    "AntPart",
    "Attention",
    "BeePart",
    "BucketPositionBias",
    "SegmentPositionEmbedding",
    "SplitSequences",
    "SplitTokens",
]

_CONFIGURED = "take it from the configuration that the model's checkpoint has"
_GUIDE = "fix: docs/cpm_live.md shows the lines of the model that change"


class Attention(bmt.DistributedModule):  # type: ignore[misc]  # BMTrain has no types
    """Replaces CPM-Live's `Attention`, with the same parameters, so checkpoints load.

    Args:
        dim_model: Width of the hidden states.
        num_heads: Attention heads.
        dim_head: Width of a head.
        dtype: dtype of the parameters.
        dropout_p: Must be None or 0: attention weights are never stored, so dropout is not supported.
        int4: Must be None or False; CPM-Bee's repository passes it.

    Raises:
        UserError: A width is not a whole number above 0, the dtype is not a floating-point dtype, `dropout_p` is above
            0, or `int4` is set.
    """

    def __init__(
        self,
        dim_model: int,
        num_heads: int,
        dim_head: int,
        dtype: torch.dtype = torch.half,
        dropout_p: float | None = None,
        int4: bool | None = None,
    ) -> None:
        super().__init__()
        if int4:
            raise UserError("int4 weights are not supported\nallowed: None or False\nfix: dtype float16 or bfloat16")
        if dropout_p:
            raise UserError(
                f"dropout_p {dropout_p} on attention weights is not supported\nallowed: None or 0\n"
                "fix: leave it out, as CPM-Live's own configurations do"
            )
        sizes = {"dim_model": dim_model, "num_heads": num_heads, "dim_head": dim_head}
        dim_model, num_heads, dim_head = (_count(name, size) for name, size in sizes.items())
        _require_dtype(dtype)
        self.dim_model, self.num_heads, self.dim_head = dim_model, num_heads, dim_head
        self.project_q = _Linear(dim_model, num_heads * dim_head, dtype)
        self.project_k = _Linear(dim_model, num_heads * dim_head, dtype)
        self.project_v = _Linear(dim_model, num_heads * dim_head, dtype)
        self.attention_out = _Linear(num_heads * dim_head, dim_model, dtype)

    def forward(
        self,
        hidden_q: Tensor,
        hidden_kv: Tensor,
        attention_mask: BiasedSequence,
        position_bias: Tensor,
        use_cache: bool = False,
        past_kv: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the output of attention of this rank's tokens to the whole sequence.

        Args:
            hidden_q: `[batch, local_tokens, dim_model]`.
            hidden_kv: Hidden states of the same tokens, in the same shape.
            attention_mask: The first result of the position bias module.
            position_bias: The second result of the position bias module: the table of biases `[rows, num_heads]`.
            use_cache: Must be False: this module is for training.
            past_kv: Must be None.

        Returns:
            `[batch, local_tokens, dim_model]`.

        Raises:
            UserError: It is called with matrices, for generation, or with hidden states of another shape or dtype.
        """
        if not isinstance(attention_mask, BiasedSequence):
            _refuse_dense("attention_mask", attention_mask)
        if not isinstance(position_bias, Tensor) or position_bias.dim() != 2:
            _refuse_dense("position_bias", position_bias)
        if use_cache or past_kv is not None:
            raise UserError("use_cache and past_kv are for generation\nfix: generate with CPM-Live's own Attention")
        # Check before weights are gathered: if only one rank raised, the others would wait for it.
        given = {"hidden_q": hidden_q, "hidden_kv": hidden_kv}
        hidden_q, hidden_kv = attention_mask.group.decided(lambda: (self._checked(given), "CPM-Live's Attention"))
        q = self.project_q(hidden_q).unflatten(-1, (self.num_heads, self.dim_head))
        k, v = (
            project(hidden_kv).unflatten(-1, (self.num_heads, self.dim_head))
            for project in (self.project_k, self.project_v)
        )
        mixed, _ = biased_attention(q, k, v, position_bias, attention_mask)
        out: Tensor = self.attention_out(mixed.flatten(2))
        return out

    def _checked(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        dtype = self.project_q.dtype
        for name, hidden in given.items():
            wanted = f"{name} must be a tensor [batch, local_tokens, {self.dim_model}] of {dtype}"
            if not isinstance(hidden, Tensor):
                raise UserError(f"{wanted}, got {type(hidden).__name__}\n{_GUIDE}")
            is_cast = torch.is_autocast_enabled(hidden.device.type) and is_cast_by_autocast(hidden)
            if hidden.dim() != 3 or hidden.shape[-1] != self.dim_model or not (hidden.dtype == dtype or is_cast):
                raise UserError(f"{wanted}, got {describe_tensors(hidden)}\nfix: dim_model and dtype as the model's")
        return tuple(given.values())


class _PositionBias(bmt.DistributedModule):  # type: ignore[misc]
    """A table of position biases and the formula of its lookup."""

    def __init__(
        self, make: Callable[[], RelativeBias], num_heads: int, dtype: torch.dtype, init_mean: float, init_std: float
    ) -> None:
        super().__init__()
        num_heads = _count("num_heads", num_heads)
        _require_dtype(dtype)
        _require_number("init_mean", init_mean, -math.inf)
        _require_number("init_std", init_std, 0)
        try:
            self.formula = make()
        except KernelError as error:
            raise UserError(str(error)) from None
        self.num_heads = num_heads
        self.relative_attention_bias = bmt.DistributedParameter(
            torch.empty(self.formula.rows, num_heads, dtype=dtype),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=init_mean, std=init_std),
        )

    def forward(self, tokens: SplitTokens, *matrices: Tensor) -> tuple[BiasedSequence, Tensor]:
        """Return the mask and the bias arguments of `Attention`; gradients flow through the second, the table.

        Args:
            tokens: The `tokens` of a part of `SplitSequences`.
            matrices: Must be empty; CPM-Live's module takes matrices here.

        Raises:
            UserError: It is called like CPM-Live's module, or the batch has relations that the table does not have.
        """
        if not isinstance(tokens, SplitTokens) or matrices:
            got = f"{1 + len(matrices)} tensors" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise UserError(
                f"a position bias is called with the tokens of a part of SplitSequences, got {got}\n{_GUIDE}"
            )
        return tokens.under(self.formula), self.relative_attention_bias


class BucketPositionBias(_PositionBias):
    """CPM-Bee's position bias, with its parameter `relative_attention_bias`; the arguments are CPM-Live's.

    Raises:
        UserError: The numbers make no buckets.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        num_segment_bucket: int = 32,
        max_distance: int = 128,
        dtype: torch.dtype = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1,
    ) -> None:
        make = partial(
            bee_bias, num_buckets=num_buckets, num_segment_buckets=num_segment_bucket, max_distance=max_distance
        )
        super().__init__(make, num_heads, dtype, init_mean, init_std)


class SegmentPositionEmbedding(_PositionBias):
    """CPM-Ant's position bias, with its parameter `relative_attention_bias`; the arguments are CPM-Live's.

    Raises:
        UserError: The numbers make no buckets.
    """

    def __init__(
        self,
        num_heads: int,
        num_segments: int = 1,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        dtype: torch.dtype = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1,
    ) -> None:
        make = partial(
            ant_bias,
            num_buckets=num_buckets,
            num_segments=num_segments,
            max_distance=max_distance,
            bidirectional=bidirectional,
        )
        super().__init__(make, num_heads, dtype, init_mean, init_std)


class _Linear(bmt.DistributedModule):  # type: ignore[misc]
    """CPM-Live's `Linear`, which divides products by sqrt(dim_in).

    Attributes:
        in_features: dim_in. OpenDelta's adapters, which CPM-Live's fine-tuning inserts, read these two names.
        out_features: dim_out.
    """

    def __init__(self, dim_in: int, dim_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dim_in = self.in_features = dim_in
        self.dim_out = self.out_features = dim_out
        self.dtype = dtype
        self.weight = bmt.DistributedParameter(
            torch.empty(dim_out, dim_in, dtype=dtype),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=1.0),
        )
        self._root = math.sqrt(dim_in)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight) / self._root


def _count(name: str, value: object) -> int:
    try:
        return whole_number(name, value, 1)
    except UserError as error:
        raise with_fix(error, _CONFIGURED) from None


def _require_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        names = "torch.float16, torch.bfloat16 or torch.float32"
        raise UserError(f"dtype must be one of floating point, got {dtype!r}\nallowed: {names}\nfix: pass one of them")


def _require_number(name: str, value: object, least: float) -> None:
    if not isinstance(value, int | float) or not (least <= value < math.inf and abs(value) < math.inf):
        bound = "a finite number" if least < 0 else f"a number of at least {least:g}"
        raise UserError(
            f"{name} must be {bound}, got {value!r}\nallowed: as CPM-Live, init_mean 0 and init_std 1\n"
            "fix: pass such a number"
        )


def _refuse_dense(name: str, value: object) -> NoReturn:
    got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise UserError(
        f"{name} must be what a position bias module of bmburst.integrations.cpm_live returned, got {got}\n{_GUIDE}"
    )
