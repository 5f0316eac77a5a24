"""Single-device operations, independent of ranks: attention kernels and the fused operations around them.

The package itself holds conventions and facts that operations, attention, data, training and plans share.
"""

IGNORE_INDEX = -100
"""Label without a loss, for padding and for tokens without a next token. The same as in torch's cross entropy."""

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward divided by those of forward: five products for two (arXiv:2307.08691, section 4.1)."""

TILE_ROWS = 64
"""Every tile of FlashAttention-4 has a multiple of this many rows."""

GATHERED_CHUNKS = 4
"""Number of chunks whose logit gradients the loss of a 16-bit model collects for one product with the hidden states.
`bmburst_ops.linear_cross_entropy` explains the number."""
NF4_BLOCK = 64
"""Numbers of a weight in 4 bits that share a scale (`bmburst_ops.nf4`)."""
NF4_GROUP = 256
"""Scales of a weight in 4 bits that share a factor."""
