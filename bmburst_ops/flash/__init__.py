"""Attention of one tile on one device: one module per backend, and `select`, which chooses among them."""

from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Kernel, Partial
from bmburst_ops.flash.reference import ReferenceKernel
from bmburst_ops.flash.select import KERNELS, NAMES, able_kernels, queries_ahead, select_kernel
from bmburst_ops.flash.triton import TritonKernel
from bmburst_ops.pattern import CAUSAL, FULL, Band, Cells, Need, Pattern, Segments

__all__ = [
    "CAUSAL",
    "FULL",
    "KERNELS",
    "NAMES",
    "BackwardInputs",
    "Band",
    "Cells",
    "Gradients",
    "Kernel",
    "Need",
    "Partial",
    "Pattern",
    "ReferenceKernel",
    "Segments",
    "TritonKernel",
    "able_kernels",
    "queries_ahead",
    "select_kernel",
]
