"""Conventions shared by operations, data and training."""

IGNORE_INDEX = -100
"""The label that counts for nothing: padding, and a token that nothing follows. As in torch's cross entropy."""
