"""Attention of one new token per sequence over a cache of keys and values, on one device."""

from bmburst_ops.decode.attention import KERNELS, append_rotated, decode_attention, merge_decode

__all__ = ["KERNELS", "append_rotated", "decode_attention", "merge_decode"]
