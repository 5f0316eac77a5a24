"""Measures CPM-Bee's attention on one GPU, with the bias computed in the kernel or given as a matrix.

The input is one sample of four segments. The first half of the tokens is given, the rest is predicted: every token sees
the given ones, and a predicted token also sees the predicted ones before it. Heads, buckets and distances are those of
CPM-Bee 10B. `kernel` is bmburst's kernel. `matrix` is attention as in CPM-Live: products, bias, mask, softmax and mask
again, with matrices of all tokens by all tokens. Bias and mask are made once, because all layers share them. `flash` is
torch's attention over all pairs without bias or mask, as an upper bound.

A row with `layers` above 1 calls attention once per layer on one new batch, and then runs all backwards; times are
divided by the layers. The matrices are made outside the timing, but the kernel's analysis of the batch is included.
`host` is the time that the host is busy in forward and backward, which bounds short sequences.

Milliseconds are medians, by CUDA events, and for the host by its clock. TFLOP/s count visible pairs, with 4 FLOPs per
feature in forward and 10 in backward. Memory is torch's peak, including inputs, bias and gradients.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Row, RowBenchmark
from benchmarks.engine.timing import median_seconds
from bmburst.amounts import GIB
from bmburst.attention.biased import BiasedSequence, biased_attention
from bmburst.comm.groups import communicator
from bmburst_ops import ATTENTION_BACKWARD
from bmburst_ops.biased import Tokens, bee_bias, bee_tokens
from bmburst_ops.biased.formula import visible

HEADS, HEAD_DIM, SEGMENTS = 32, 128, 4
FORMULA = bee_bias(num_buckets=256, num_segment_buckets=32, max_distance=2048)
_WARM_UP = 2

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Method = tuple[Callable[[], Attention], list[Tensor], int]
"""A function that returns attention for a new batch, the tensors it needs gradients of, and the visible pairs."""


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", default="2048,4096,8192,32768,131072", help="tokens of the sample (default: %(default)s)")
    add("--layers", type=int, default=4, help="calls per batch, besides one (default: 4)")
    add("--most-layered", type=int, default=8192, help="longest sample with several layers, in tokens (default: 8192)")
    add("--most-matrix", type=int, default=8192, help="longest sample for `matrix` (default: 8192)")
    add("--repeats", type=int, default=5, help="measured calls (default: 5)")


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    for (length, layers), name in itertools.product(_cells(options), _METHODS):
        if name != "matrix" or length <= options.most_matrix:
            yield _measure(name, length, layers, options.repeats)


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    columns = "tokens", "layers", "attention", "forward", "TFLOP/s", "with backward", "TFLOP/s", "host", "memory"
    lines = []
    for row in record["rows"]:
        cells = [f"{row['forward_ms']:.2f} ms", f"{row['forward_tflops']:.0f}", f"{row['both_ms']:.2f} ms"]
        cells += [f"{row['both_tflops']:.0f}", f"{row['host_ms']:.2f} ms", f"{row['gib']:.2f} GiB"]
        lines.append([row["tokens"], row["layers"], row["name"], *cells])
    return "\n".join(markdown_table(columns, lines))


def _cells(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Return the tokens and layers of each measurement."""
    lengths = [int(length) for length in options.tokens.split(",")]
    layered = options.layers > 1
    return [
        (length, layers)
        for length in lengths
        for layers in (1, options.layers)[: 1 + (layered and length <= options.most_layered)]
    ]


def _measure(name: str, length: int, layers: int, repeats: int) -> Row:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    *whole, grad = (torch.randn(1, length, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    inputs = [[t.detach().requires_grad_() for t in whole] for _ in range(layers)]  # each with its own gradient
    table = torch.randn(FORMULA.rows, HEADS, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    new_batch, learned, pairs = _METHODS[name](table, _tokens(length))

    def both() -> None:
        attention = new_batch()
        outs = [attention(*matrices) for matrices in inputs]
        torch.autograd.grad(outs, [*itertools.chain(*inputs), *learned], [grad] * layers)

    def forward() -> None:
        attention = new_batch()
        with torch.no_grad():
            for matrices in inputs:
                attention(*matrices)

    flops = 4 * pairs * HEADS * HEAD_DIM
    found = {"forward": (forward, flops), "both": (both, (1 + ATTENTION_BACKWARD) * flops)}
    row: Row = {"name": name, "tokens": length, "layers": layers, "pairs": pairs}
    for direction, (call, work) in found.items():
        (spent,) = median_seconds([call], repeats=repeats, warm_up=_WARM_UP)
        seconds, host = (each / layers for each in spent)
        row |= {f"{direction}_ms": 1e3 * seconds, f"{direction}_tflops": work / seconds / 1e12, "host_ms": 1e3 * host}
    return row | {"gib": torch.cuda.max_memory_allocated() / GIB}


def _tokens(length: int) -> Tokens:
    ones = torch.ones(1, length, dtype=torch.int32, device="cuda")
    position = torch.arange(length, dtype=torch.int32, device="cuda")[None]
    segment = position * SEGMENTS // length
    zeros = torch.zeros_like(ones)
    is_given = position < length // 2
    return bee_tokens(
        *(position, segment, SEGMENTS * ones, zeros, zeros, zeros, is_given), torch.tensor([length], device="cuda")
    )


def _relations() -> Tensor:
    """Return a relation for each pair of segments: 0 within a segment, where the distance determines the bias."""
    relations = torch.arange(2, SEGMENTS**2 + 2, dtype=torch.int32, device="cuda")
    relations[:: SEGMENTS + 1] = 0
    return relations[None]


def _by_kernel(table: Tensor, tokens: Tokens) -> Method:
    relations, group = _relations(), communicator(None)

    def new_batch() -> Attention:
        sequence = BiasedSequence(formula=FORMULA, relations=relations, tokens=tokens, group=group)
        return lambda q, k, v: biased_attention(q, k, v, table, sequence)[0]

    return new_batch, [table], _pairs(tokens)


def _by_matrix(table: Tensor, tokens: Tokens) -> Method:
    with torch.no_grad():
        bias = F.embedding(FORMULA.buckets(tokens, tokens, _relations()), table).permute(0, 3, 1, 2).contiguous()
    hidden = ~visible(tokens, tokens)[:, None]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        scores = query @ key.transpose(2, 3) / HEAD_DIM**0.5 + bias
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).masked_fill(hidden, 0)
        return (weights @ value).transpose(1, 2)

    return lambda: attention, [bias.requires_grad_()], _pairs(tokens)


def _by_flash(_: Tensor, tokens: Tokens) -> Method:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)

    return lambda: attention, [], tokens.shape[1] ** 2


_METHODS = {"kernel": _by_kernel, "matrix": _by_matrix, "flash": _by_flash}


def _pairs(tokens: Tokens) -> int:
    given = int((tokens.context != 0).sum())
    predicted = tokens.shape[1] - given
    return given * tokens.shape[1] + predicted * (predicted + 1) // 2


BENCHMARKS = (
    RowBenchmark(
        name="biased", about=__doc__, configure=_configure, measure=lambda options: ({}, _rows(options)), table=table,
        needs_gpu=True,
    ),
)  # fmt: skip
