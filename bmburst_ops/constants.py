"""Conventions and facts shared by operations, attention, data and training."""

IGNORE_INDEX = -100
"""The label that counts for nothing: padding, and a token that nothing follows. As in torch's cross entropy."""

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward over those of its forward: five products for two (arXiv:2307.08691, section 4.1)."""

TILE_ROWS = 64
"""Every tile of FlashAttention-4 has a multiple of this many rows."""

GATHERED_CHUNKS = 4
"""Chunks of tokens of which the loss of a 16-bit model keeps the gradients of the logits, for one product with the
head's states: `bmburst_ops.linear_cross_entropy` says why so many."""
