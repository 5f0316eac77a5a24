"""Attention with a learned bias and a mask that are computed inside the kernel, from a few integers of each token."""

from bmburst_ops.biased.formula import RelativeBias, ant_bias, ant_relations, bee_bias
from bmburst_ops.biased.kernel import BiasedGradients, BiasedKernel, require_inputs
from bmburst_ops.biased.pairs import Pairs, require_relations
from bmburst_ops.biased.reference import BiasedReferenceKernel
from bmburst_ops.biased.select import BIASED_NAMES, select_biased_kernel
from bmburst_ops.biased.tokens import PADDING, Tokens, ant_tokens, bee_tokens
from bmburst_ops.biased.triton import BiasedTritonKernel

__all__ = [
    "BIASED_NAMES",
    "PADDING",
    "BiasedGradients",
    "BiasedKernel",
    "BiasedReferenceKernel",
    "BiasedTritonKernel",
    "Pairs",
    "RelativeBias",
    "Tokens",
    "ant_bias",
    "ant_relations",
    "ant_tokens",
    "bee_bias",
    "bee_tokens",
    "require_inputs",
    "require_relations",
    "select_biased_kernel",
]
