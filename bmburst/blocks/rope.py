"""Rotary position embedding: frequencies, their scaling for longer contexts, and cosine and sine tables.

Frequencies follow Hugging Face transformers (modeling_rope_utils.py), formula by formula and in fp32, so that the same
weights give the same model in both packages.
"""

import math

import torch
from torch import Tensor

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.families import RopeScaling
from bmburst.errors import UserError


def rotary_frequencies(config: LlamaConfig, length: int | None) -> tuple[Tensor, float]:
    """Return the rotary frequency of each pair of features, and the factor on cosine and sine.

    Args:
        config: head_dim, rope_theta and rope_scaling are used; dynamic scaling also uses max_position_embeddings.
        length: Tokens of the whole sequence, over all ranks. Only dynamic scaling uses it.

    Returns:
        Frequencies `[head_dim / 2]`, fp32 on the CPU, in radians per position; and a factor, 1 for all kinds but yarn.

    Raises:
        UserError: Dynamic scaling without a length.
    """
    scaling = config.rope_scaling
    if scaling is None:
        return _plain(config.rope_theta, config.head_dim), 1.0
    if scaling.kind == "linear":  # arXiv:2306.15595: positions divided by the factor
        return _plain(config.rope_theta, config.head_dim) / scaling.factor, 1.0
    if scaling.kind == "dynamic":
        return _plain(_dynamic_base(config, scaling, length), config.head_dim), 1.0
    if scaling.kind == "yarn":
        return _yarn(config, scaling)
    return _llama3(config, scaling), 1.0


def rotary_tables(
    config: LlamaConfig, positions: Tensor, length: int | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles.

    Args:
        config: See `rotary_frequencies`.
        positions: `[batch, tokens]` int64, positions of this rank's tokens in the whole sequence, in any order.
        length: Tokens of the whole sequence, over all ranks.
        dtype: dtype of the model. The tables have the wider of it and fp32.

    Returns:
        Two tensors `[batch, tokens, head_dim / 2]` on the device of `positions`.
    """
    frequencies, factor = rotary_frequencies(config, length)
    # non_blocking is safe from pageable memory: the driver stages the data before the call returns.
    return angle_tables(frequencies.to(positions.device, non_blocking=True), factor, positions, dtype)


def angle_tables(frequencies: Tensor, factor: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, for frequencies on the device of `positions`.

    Args:
        frequencies: `[head_dim / 2]`, or one set per position, `[..., head_dim / 2]`.
        factor: Factor on cosine and sine.
        positions: `[...]` int64.
        dtype: dtype of the model. The tables have the wider of it and fp32.

    Returns:
        Two tensors `[..., head_dim / 2]`.
    """
    # fp64, because fp32 angles at a million tokens are off by up to 0.03 radians. Runs once per forward pass.
    angles = positions.unsqueeze(-1).double() * frequencies.double()
    wide = torch.promote_types(dtype, torch.float32)
    return (angles.cos() * factor).to(wide), (angles.sin() * factor).to(wide)


def _plain(base: float, head_dim: int) -> Tensor:
    """base^(-2i / head_dim), arXiv:2104.09864, section 3.2."""
    frequencies: Tensor = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    return frequencies


def _dynamic_base(config: LlamaConfig, scaling: RopeScaling, length: int | None) -> float:
    """The base of dynamic NTK scaling: the highest frequency stays, the others fall with the sequence length.

    base (factor length / trained - (factor - 1))^(d / (d - 2)): NTK-aware scaling by u/bloc97, made dynamic by
    u/emozilla; see arXiv:2309.00071, sections 3.1 and 3.3.
    """
    if length is None:
        raise UserError(
            "rope_scaling of kind dynamic depends on the length of the sequence, got none\n"
            "fix: pass length, the tokens of the whole sequence over all ranks"
        )
    trained = scaling.original_max_position_embeddings or config.max_position_embeddings
    stretch = scaling.factor * max(length, trained) / trained - (scaling.factor - 1)
    # max: with head_dim 2 the only frequency is 1, for any base.
    return float(config.rope_theta * stretch ** (config.head_dim / max(config.head_dim - 2, 1)))


def _yarn(config: LlamaConfig, scaling: RopeScaling) -> tuple[Tensor, float]:
    """arXiv:2309.00071, equations 19 to 23: keep high frequencies, interpolate low ones, with a linear ramp between."""
    trained, dim, base = scaling.original_max_position_embeddings, config.head_dim, config.rope_theta
    assert trained is not None  # RopeScaling requires it

    def pair_that_turns(times: float) -> float:
        """Index (a real number) of the pair that makes this many turns over the training length."""
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), dim - 1)
    width = high - low or 0.001  # a ramp of zero width becomes a step
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    plain = _plain(base, dim)
    mixed = plain / scaling.factor * interpolated + plain * (1 - interpolated)
    factor = scaling.attention_factor
    return mixed, 0.1 * math.log(scaling.factor) + 1.0 if factor is None else factor


def _llama3(config: LlamaConfig, scaling: RopeScaling) -> Tensor:
    """Llama 3.1 (meta-llama/llama-models, apply_scaling): by wavelength, with a linear blend between the two limits."""
    trained = scaling.original_max_position_embeddings
    assert trained is not None  # RopeScaling requires it
    plain = _plain(config.rope_theta, config.head_dim)
    turns = trained * plain / (2 * math.pi)  # over the training length
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / scaling.factor + blend * plain
