"""Shapes, masks, cells and FLOPs of `bmburst bench attention`. Imports no torch."""

import math
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from statistics import NormalDist
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.engine.kinds import ONE_GPU, BaseCell, BaseSelection
from bmburst.blocks.config import LlamaConfig
from bmburst.errors import UserError
from bmburst.schedule.documents import Documents
from bmburst.schedule.mask import Mask, SlidingWindow, make_mask
from bmburst.schedule.tiles import visible_area
from bmburst.schedule.tree import Tree
from bmburst_ops.pattern import CAUSAL, FULL, Band, Segments

WINDOW = 4096  # tokens that a query sees under the mask "window"
MEDIAN, SIGMA = 2048, 1.3  # of the log-normal distribution of document lengths
SHORTEST = 16
ANSWER = 4096  # tokens of each answer under the mask "tree"
SEED = 0
_KIB = 1024
_PART = 16  # in short sequences, window and median are 1 / _PART of the tokens


def window_tokens(tokens: int) -> int:
    """Return the window in tokens, including the query: 4,096, or a 16th of sequences below 64K tokens."""
    return max(1, min(WINDOW, tokens // _PART))


def median_tokens(tokens: int) -> int:
    """Return the median document length: 2,048, or a 16th of sequences below 32K tokens, but at least 16."""
    return max(SHORTEST, min(MEDIAN, tokens // _PART))


@lru_cache(maxsize=64)
def sample_document_lengths(tokens: int) -> tuple[int, ...]:
    """Return the lengths of the documents that are packed into a sequence. They are the same on every machine.

    Lengths are log-normal with the median of `median_tokens` and sigma 1.3, from 16 to `tokens` tokens: long-tailed, as
    in real corpora. They are drawn until the sequence is full, and the last one is truncated. If less than 16 tokens
    would remain after a document, the document gets them.
    """
    generator, normal = random.Random(SEED), NormalDist(math.log(median_tokens(tokens)), SIGMA)
    lengths, left = [], tokens
    while left:
        # Inverse transform sampling: of Python's generators only `random` gives the same numbers in all versions.
        length = min(left, max(SHORTEST, round(math.exp(normal.inv_cdf(generator.random())))))
        lengths.append(left if left - length < SHORTEST else length)
        left -= lengths[-1]
    return tuple(lengths)


def tree_of(tokens: int) -> Tree:
    """Return a prompt with 8 answers, or 16 from 64K tokens on, of 4,096 tokens each; of a 10th in short sequences."""
    answer, answers = max(1, min(ANSWER, tokens // 10)), 8 if tokens < 64 * _KIB else 16
    answers = min(answers, max(1, (tokens - 1) // answer))
    return Tree([-1, *(0,) * answers], [tokens - answers * answer, *(answer,) * answers])


def visible_pairs(mask: str, tokens: int) -> float:
    """Return the number of visible query-key pairs.

    For a causal mask it is half of all pairs, without the diagonal, as in publications.
    """
    if mask == "documents":
        return float(sum(n * (n + 1) // 2 for n in sample_document_lengths(tokens)))
    if mask == TREE:
        return float(visible_area(tree_of(tokens), tokens, np.arange(tokens)))
    if mask == "window":
        seen = window_tokens(tokens)
        return float(tokens * seen - seen * (seen - 1) // 2)
    return float(tokens**2) * (0.5 if mask == "causal" else 1.0)


def facts(mask: str, tokens: int) -> dict[str, Any]:
    """Return the properties of the mask for a result row; empty for causal and full."""
    if mask == "documents":
        lengths = sample_document_lengths(tokens)
        found = {"number": len(lengths), "median": statistics.median(lengths), "longest": max(lengths)}
        return {"documents": found | {"drawn_median": median_tokens(tokens), "sigma": SIGMA, "seed": SEED}}
    if mask == TREE:
        prompt, *answers = tree_of(tokens).lengths
        return {TREE: {"prompt": prompt, "answers": len(answers), "answer": answers[0]}}
    return {"window": window_tokens(tokens)} if mask == "window" else {}


def mask_of(name: str, tokens: int) -> Mask:
    """Return the named mask for `burst_attention`, for a sequence of `tokens` tokens."""
    if name == "documents":
        return Documents(sample_document_lengths(tokens))
    if name == TREE:
        return tree_of(tokens)
    return SlidingWindow(window_tokens(tokens)) if name == "window" else make_mask(name)


def pattern_of(name: str, tokens: int) -> Band | Segments:
    """Return the named mask as the pattern of one kernel call on all queries and keys."""
    if name == "documents":
        edges = tuple(accumulate(sample_document_lengths(tokens), initial=0))
        return Segments(CAUSAL, edges, edges)
    if name == "window":
        return Band(window_tokens(tokens) - 1, 0)
    return CAUSAL if name == "causal" else FULL


PLAIN_MASKS = ("causal", "full")
MASKS = (*PLAIN_MASKS, "documents", "window")  # the latter two have a suite each, of the same name
TREE = "tree"  # a suite too; it is no single pattern, so only `burst_attention` computes it
MHA, GQA = (32, 32), (32, 8)
HEAD_DIM = 128
BALANCED, LLAMA3 = "-balanced", "-llama3"  # suffixes of the names of methods for documents


class AttentionSuite(NamedTuple):
    """The defaults of a suite."""

    tokens: tuple[int, ...]  # sequence lengths
    batches: tuple[int, ...] = (1,)  # batch sizes
    setups: tuple[tuple[int, int], ...] = (MHA, GQA)  # `(heads, kv_heads)`
    masks: tuple[str, ...] = PLAIN_MASKS  # the masks of the suite; options cannot add masks


SUITES: Mapping[str, AttentionSuite] = MappingProxyType(
    {
        "sequence": AttentionSuite(tuple(_KIB * n for n in (32, 64, 128, 256, 512, 1024))),
        "batch": AttentionSuite((64 * _KIB,), batches=(1, 2, 4, 8)),
        "block": AttentionSuite(tuple(_KIB * n for n in (32, 64, 128, 256)), setups=(GQA,)),
        "documents": AttentionSuite((128 * _KIB, 512 * _KIB), masks=("documents",)),
        "window": AttentionSuite((256 * _KIB,), masks=("window",)),
        TREE: AttentionSuite((40 * _KIB, 128 * _KIB), masks=(TREE,)),
        "accuracy": AttentionSuite((4 * _KIB,), masks=MASKS),
    }
)


@dataclass(frozen=True, kw_only=True)
class Cell(BaseCell):
    """One measurement; `suite` is one of `SUITES`, `method` is a name of `benchmarks.attention.methods`."""

    tokens: int  # tokens of the whole sequence
    batch: int = 1  # number of sequences
    heads: int  # query heads
    kv_heads: int  # key/value heads
    head_dim: int = HEAD_DIM  # features of a head
    mask: str = "causal"  # one of `MASKS`, or `TREE`

    @property
    def is_causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask == "causal"

    @property
    def head_setup(self) -> str:
        """`mha` or `gqa` for the heads of the suites; for others, for example, `4-2x64`."""
        known = {(*MHA, HEAD_DIM): "mha", (*GQA, HEAD_DIM): "gqa"}
        return known.get((self.heads, self.kv_heads, self.head_dim), f"{self.heads}-{self.kv_heads}x{self.head_dim}")

    @property
    def name(self) -> str:
        """For example `sequence/65536/mha/causal/ours` or `window/262144/gqa/ours`."""
        tokens = f"{self.batch}x{self.tokens}" if self.suite == "batch" else f"{self.tokens}"
        mask = "" if self.suite == self.mask else f"/{self.mask}"
        return f"{self.suite}/{tokens}/{self.head_setup}{mask}/{self.method}"


def cell_of(cell: BaseCell, model: LlamaConfig, tokens: int, batch: int, mask: str = "causal") -> Cell:
    """Return the cell with the attention of a model's layer, for a cell of a benchmark of models."""
    return Cell(
        suite="sequence",
        method=cell.method,
        ranks=cell.ranks,
        device=cell.device,
        dtype=cell.dtype,
        tokens=tokens,
        batch=batch,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        mask=mask,
    )


@dataclass(frozen=True, kw_only=True)
class Selection(BaseSelection):
    """Selects the cells to list; for None the defaults of the suite apply.

    Raises:
        UserError: Heads or a length do not divide.
    """

    heads: tuple[tuple[int, int], ...] | None = None  # `(heads, kv_heads)` setups, instead of MHA and GQA
    head_dim: int = HEAD_DIM  # features of a head
    masks: tuple[str, ...] = (*MASKS, TREE)  # names of masks, in the order of measurement

    def __post_init__(self) -> None:
        for heads, kv_heads in self.heads or ():
            if heads % kv_heads:
                raise UserError(
                    f"--heads {heads} --kv-heads {kv_heads}\nallowed: heads a multiple of kv heads\n"
                    "fix: for example --heads 32 --kv-heads 8"
                )
        super().__post_init__()


def list_cells(selection: Selection) -> tuple[Cell, ...]:
    """Return the selected cells of every suite, in the order in which they run: causal first, short sequences first."""
    found = (cell for suite in SUITES for cell in _cells(selection, suite))
    return tuple(cell for cell in found if _is_for(cell) and selection.fits(cell))


def accuracy_ranks(world: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to `world`, and `world` itself."""
    powers = (1 << n for n in range(world.bit_length()))
    return tuple(sorted({p for p in powers if p <= world} | {world}))


def _is_for(cell: Cell) -> bool:
    """Return whether the method is measured for the cell's suite, mask and ranks."""
    if cell.suite == "accuracy" and (cell.ranks == 1) != (cell.method == ONE_GPU):
        return cell.ranks == 1 and cell.method == "ours"  # other methods are measured on several ranks
    return cell.mask == "documents" or not cell.method.endswith((BALANCED, LLAMA3))


def _cells(selection: Selection, name: str) -> Iterator[Cell]:
    suite = SUITES[name]
    everything = product(
        accuracy_ranks(selection.ranks[0]) if name == "accuracy" else selection.ranks,
        (mask for mask in selection.masks if mask in suite.masks),
        selection.heads or suite.setups,
        selection.tokens or suite.tokens,
        suite.batches,
        selection.methods,
    )
    for ranks, mask, (heads, kv_heads), tokens, batch, method in everything:
        yield Cell(
            suite=name,
            method=method,
            ranks=ranks,
            device=selection.device,
            dtype=selection.plain_dtype,
            tokens=tokens,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=selection.head_dim,
            mask=mask,
        )


_TILE = 128  # rows of a kernel's block: a sequence that ends inside a block costs more time than its FLOPs
_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
FP32 = 4


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Bytes of one rank's tensors."""

    q: int  # bytes of q, also of the output
    k: int  # bytes of k, also of v
    statistics: int  # bytes of one fp32 number per query and head
    wide: float  # bytes of fp32 divided by the cell's item size: the factor for accumulators

    @property
    def held(self) -> int:
        """q, k, v, the output and the gradients of all four."""
        return 4 * self.q + 4 * self.k


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank receives, in forward and in forward plus backward."""

    forward: float
    forward_backward: float


def sizes(cell: Cell) -> TensorBytes:
    """Return the bytes of the tensors of a rank's share of the sequence."""
    rows = cell.batch * (cell.tokens // cell.ranks)
    item = _ITEMSIZE[cell.dtype]
    wide = max(FP32, item)
    return TensorBytes(
        q=rows * cell.heads * cell.head_dim * item,
        k=rows * cell.kv_heads * cell.head_dim * item,
        statistics=rows * cell.heads * wide,
        wide=wide / item,
    )


def forward_flops(cell: Cell) -> float:
    """Return the FLOPs of attention, forward, over a whole sequence: 4 B H D per visible pair."""
    return 4.0 * cell.batch * visible_pairs(cell.mask, cell.tokens) * cell.heads * cell.head_dim


def one_gpu_cell(cell: Cell) -> Cell:
    """Return the cell of the comparison on one GPU: a rank's share of the FLOPs.

    Under a causal or full mask it is a sequence of S / sqrt(P) tokens, in whole tiles of the kernel. Under other masks
    it is the same sequence, with the same documents or window, and a P-th of the heads, so that documents keep their
    lengths. (A subset of documents could not have a P-th of the pairs if the longest document has more.) Numbers of
    heads are rounded down, and every KV head keeps a query head. Under a tree it is `plain_causal`, since no single
    call of a kernel computes a tree. Rates are compared, not times.
    """
    if cell.mask == TREE:
        return plain_causal(cell)
    if cell.mask in PLAIN_MASKS:
        return replace(cell, ranks=1, tokens=_whole_tiles(cell.tokens / math.sqrt(cell.ranks)))
    kv_heads = max(1, cell.kv_heads // cell.ranks)
    heads = kv_heads * max(1, cell.heads // cell.ranks // kv_heads)
    return replace(cell, ranks=1, heads=heads, kv_heads=kv_heads)


def plain_causal(cell: Cell) -> Cell:
    """Return a causal sequence with all heads and a rank's share of the FLOPs, in whole tiles of the kernel.

    It measures the rate of one GPU's kernel without documents or a window, which make tiles inefficient.
    """
    tokens = math.sqrt(2 * visible_pairs(cell.mask, cell.tokens) / cell.ranks)
    return replace(cell, ranks=1, mask="causal", tokens=_whole_tiles(tokens))


def one_gpu_memory(cell: Cell) -> float:
    """Return the approximate peak bytes of the comparison on one GPU: its tensors, and dQ in fp32."""
    is_one = cell.mask in (*PLAIN_MASKS, TREE)
    others = (one_gpu_cell(cell),) if is_one else (one_gpu_cell(cell), plain_causal(cell))
    return sum(own.held + own.q * own.wide for own in map(sizes, others))


def _whole_tiles(tokens: float) -> int:
    return int(tokens) // _TILE * _TILE if tokens > 8 * _TILE else max(1, int(tokens))
