"""Conventions and facts shared by operations, attention, data and training."""

IGNORE_INDEX = -100
"""The label that counts for nothing: padding, and a token that nothing follows. As in torch's cross entropy."""

TILE_ROWS = 64
"""Every tile of FlashAttention-4 has a multiple of this many rows."""
