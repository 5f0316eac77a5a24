"""Measures block-sparse attention and cross-attention: `bmburst bench WHAT --gpus N`.

Heads are those of LLaMA-3-8B, and tensors are bfloat16 (float32 on CPUs). Calls alternate with those that they are
compared with; a time is the median on the slowest rank. If a method does not support a case, its row gives the reason.
`--small` runs a tiny case, also on a CPU. WHAT is one of:

block-sparse: 128K causal tokens in random blocks of 128 tokens; diagonal blocks are always visible. The density is the
fraction of causal pairs that is visible. On one rank, calls of each kernel alternate with calls of the fastest kernel
for dense causal attention, and a ratio of 1 means that the time is proportional to the density. With `--gpus N` the
sequence is split over N ranks, and calls alternate with calls of one GPU's kernel on all tokens and the same blocks. A
ratio of 1 then means that N ranks are N times as fast. The queries of one rank and the keys of one rank are a
partition. Partitions without a visible pair are skipped, and the row contains their fraction.

block-sparse-errors: 4K tokens with block-sparse masks, at every head dim that FlashAttention-4 supports. A row contains
the relative L2 errors of the output and of each gradient, compared with attention in float64 on the same inputs.

cross: 64K queries and 128K keys. Calls of each strategy and transport alternate with calls of one GPU's kernel on all
queries and keys. A ratio of 1 means that N ranks are N times as fast as that kernel.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention.measure import relative_errors
from benchmarks.attention.method import both, forward_without_grad
from benchmarks.engine.machine import RankGroup, start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, RowBenchmark
from benchmarks.engine.timing import Times, beside_one_gpu, in_turns, quotient
from bmburst.attention.api import burst_attention
from bmburst.attention.call import decide
from bmburst.attention.options import AttentionOptions
from bmburst.comm.groups import communicator, single_rank_group
from bmburst.errors import UserError, first_line
from bmburst.schedule.layout import padded_layout
from bmburst.schedule.mask import BlockSparse
from bmburst.schedule.tiles import visible_area
from bmburst_ops.flash.fa4 import BLOCK_HEAD_DIMS
from bmburst_ops.pattern import BLOCK

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DIRECTIONS = ("forward", "forward and backward")
TOKENS, SMALL_TOKENS = 131_072, 200
DENSITIES = (0.1, 0.25, 0.5)
ERROR_TOKENS = 4096
RESULTS = ("out", "dq", "dk", "dv")
LAYOUTS = ("zigzag", "striped", "contiguous", "balanced")
LENGTHS, SMALL_LENGTHS = (65_536, 131_072), (96, 160)  # numbers of queries and keys
METHODS = (("auto", "auto"), ("heads", "nccl"), ("gather", "auto"), ("burst", "auto"), ("kv", "auto"))
NAMES = ("mask", "layout", "key_layout")
CASES = (("causal", "zigzag", "zigzag"), ("causal", "striped", "striped"), ("full", "zigzag", "zigzag"))
"""Values of `NAMES`. Without a mask, one layout is enough: every layout balances the work."""
_COMPARED = ("dense_milliseconds", "one_gpu_milliseconds")  # key of the time compared with, on one rank and on several
_SEED = 0
Calls = dict[str, Callable[[], object]]
"""Calls of attention by direction."""


class Inputs(NamedTuple):
    """Queries, keys, values and the gradient of the output, each `[1, tokens, heads, head_dim]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @classmethod
    def random(cls, queries: int, keys: int, device: torch.device, head_dim: int = HEAD_DIM) -> "Inputs":
        """Return random inputs, in bfloat16 on a GPU and in float32 on a CPU."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shapes = [(1, queries, HEADS, head_dim), *[(1, keys, KV_HEADS, head_dim)] * 2, (1, queries, HEADS, head_dim)]
        q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        return cls(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad)

    def in_float64(self) -> "Inputs":
        """Return the same inputs in float64."""
        q, k, v, grad = (tensor.detach().double() for tensor in self)
        return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad)

    def results(self, **options: Any) -> tuple[Tensor, ...]:
        """Return the output of `burst_attention` with these options, and the gradients of queries, keys and values."""
        out = burst_attention(*self[:3], **options)
        return out.detach(), *torch.autograd.grad(out, self[:3], self.grad)

    def calls(self, **options: Any) -> Calls:
        """Return calls of `burst_attention` with these options, by direction."""
        attend = partial(burst_attention, **options)
        calls = partial(forward_without_grad, attend, *self[:3]), partial(both, attend, *self)
        return dict(zip(DIRECTIONS, calls, strict=True))


class Effort(NamedTuple):
    """The arguments of `in_turns`: ranks, number of rounds, and approximate seconds."""

    group: RankGroup
    repeats: int
    seconds: float


def _configure_sparse(parser: argparse.ArgumentParser) -> None:
    _configure_errors(parser)
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="zigzag", help="layout of tokens on several ranks (default: %(default)s)"
    )


def _configure_errors(parser: argparse.ArgumentParser) -> None:
    _configure(parser)
    parser.add_argument("--kernels", default="triton,fa4", help="names of kernels (default: %(default)s)")


def _configure_cross(parser: argparse.ArgumentParser) -> None:
    _configure(parser)
    parser.add_argument(
        "--case",
        action="append",
        type=_case,
        dest="cases",
        metavar="MASK/LAYOUT/KEY_LAYOUT",
        help=f"a case to measure; can be repeated (default: {', '.join(map('/'.join, CASES))})",
    )


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="short sequences, for a quick test")


def _effort(options: argparse.Namespace) -> Effort:
    group = RankGroup.world(start_ranks())
    return Effort(group, 2, 0.0) if options.small else Effort(group, 5, 3.0)


def _case(text: str) -> tuple[str, str, str]:
    mask, layout, key_layout = text.split("/")
    return mask, layout, key_layout


def _block_sparse(options: argparse.Namespace) -> Measured:
    effort, tokens = _effort(options), SMALL_TOKENS if options.small else TOKENS
    ranks, kernels = effort.group.size, options.kernels.split(",")
    facts: dict[str, Any] = {"tokens": tokens, "block_size": BLOCK, "head_dim": HEAD_DIM}
    facts |= {"heads": HEADS, "kv_heads": KV_HEADS}
    if ranks == 1:
        return facts, _on_one_rank(tokens, kernels, effort)
    facts |= {"sequence_ranks": ranks, "layout": options.layout}
    return facts, _over_ranks(tokens, kernels, options.layout, effort)


def _block_sparse_errors(options: argparse.Namespace) -> Measured:
    tokens = SMALL_TOKENS if options.small else ERROR_TOKENS
    facts = {"tokens": tokens, "block_size": BLOCK, "heads": HEADS, "kv_heads": KV_HEADS}
    return facts, _errors(tokens, options.kernels.split(","), _effort(options).group)


def _cross(options: argparse.Namespace) -> Measured:
    queries, keys = SMALL_LENGTHS if options.small else LENGTHS
    facts = {"queries": queries, "keys": keys, "heads": HEADS, "kv_heads": KV_HEADS}
    return facts, _over_cases(options.cases or CASES, queries, keys, _effort(options))


def sparse_mask(tokens: int, density: float) -> tuple[BlockSparse, float]:
    """Return a causal mask of random blocks, the same for the same arguments, and its actual density."""
    blocks = -(-tokens // BLOCK)
    on = np.tri(blocks, dtype=bool) & (np.random.default_rng(_SEED).random((blocks, blocks)) < density)
    mask = BlockSparse(on | np.eye(blocks, dtype=bool), BLOCK, causal=True)
    return mask, visible_area(mask, tokens, np.arange(tokens)) / (tokens * (tokens + 1) / 2)


def _on_one_rank(tokens: int, kernels: Sequence[str], effort: Effort) -> Iterator[dict[str, Any]]:
    """Yield a row for each density and kernel, compared with dense attention on one rank."""
    inputs = Inputs.random(tokens, tokens, effort.group.device)
    dense = inputs.calls(mask="causal", kernel="auto")
    for density in DENSITIES:
        mask, own = sparse_mask(tokens, density)
        for kernel in kernels:
            row: dict[str, Any] = {"asked": density, "density": own, "kernel": kernel}
            try:
                for direction, call in inputs.calls(mask=mask, kernel=kernel).items():
                    times = in_turns(call, dense[direction], **effort._asdict())
                    row[direction] = {
                        "milliseconds": Times.of(times[0]).median,
                        "dense_milliseconds": Times.of(times[1]).median,
                        "ratio": quotient(times[0], times[1]) / own,
                    }
            except UserError as error:
                row["refused"] = first_line(error)
            yield row


def _errors(tokens: int, kernels: Sequence[str], group: RankGroup) -> Iterator[dict[str, Any]]:
    """Yield a row for each head dim, density and kernel, compared with attention in float64."""
    for head_dim, density in product(sorted(BLOCK_HEAD_DIMS), (*DENSITIES, 1.0)):
        inputs = Inputs.random(tokens, tokens, group.device, head_dim)
        mask, own = sparse_mask(tokens, density)
        exact = inputs.in_float64().results(mask=mask, kernel="reference")
        for kernel in kernels:
            row: dict[str, Any] = {"head_dim": head_dim, "density": own, "kernel": kernel}
            try:
                ours = inputs.results(mask=mask, kernel=kernel)
                row |= zip(RESULTS, relative_errors(ours, exact, group), strict=True)
            except UserError as error:
                row["refused"] = first_line(error)
            yield row


def _over_ranks(tokens: int, kernels: Sequence[str], layout: str, effort: Effort) -> Iterator[dict[str, Any]]:
    """Yield a row for each density and kernel, comparing all ranks with one GPU. All ranks must call it."""
    comm, size = communicator(None), effort.group.size
    whole = Inputs.random(tokens, tokens, effort.group.device)
    for density in DENSITIES:
        mask, own = sparse_mask(tokens, density)
        cut = padded_layout(layout, size, tokens, mask)
        part = Inputs.random(cut.tokens, cut.tokens, effort.group.device)
        for kernel in kernels:
            row: dict[str, Any] = {"asked": density, "density": own, "kernel": kernel}
            try:
                options = AttentionOptions(mask=mask, kernel=kernel, layout=layout)
                call = decide(comm, part.q, part.k, part.v, tokens, options)
                row["skipped"] = sum(not call.tiles(*pair) for pair in product(range(size), repeat=2)) / size**2
                one = whole.calls(mask=mask, kernel=kernel, layout="contiguous", group=single_rank_group(comm))
                ours = part.calls(mask=mask, kernel=kernel, layout=layout, length=tokens, group=comm)
                _compare(row, ours, one, effort)
            except UserError as error:
                row["refused"] = first_line(error)
            yield row


def _over_cases(
    cases: Sequence[tuple[str, str, str]], queries: int, keys: int, effort: Effort
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case of cross-attention, strategy and transport. All ranks must call it."""
    device, size = effort.group.device, effort.group.size
    single = single_rank_group(communicator(None))
    whole, part = Inputs.random(queries, keys, device), Inputs.random(queries // size, keys // size, device)
    rows = list(product(cases, METHODS))
    # The first row is measured twice and its first result is discarded: idle GPUs raise their clocks under load.
    for number, (case, (strategy, transport)) in enumerate([rows[0], *rows]):
        named = dict(zip(NAMES, case, strict=True))
        one = whole.calls(mask=named["mask"], key_length=keys, layout="contiguous", group=single)
        ours = part.calls(**named, key_length=keys, strategy=strategy, transport=transport)
        row: dict[str, Any] = {**named, "strategy": strategy, "transport": transport}
        try:
            _compare(row, ours, one, effort)
        except UserError as error:
            row["refused"] = first_line(error)
        if number:
            yield row


def _compare(row: dict[str, Any], ours: Calls, one: Calls, effort: Effort) -> None:
    """Add the times of all ranks and of one GPU to the row, by direction."""
    for direction, call in ours.items():
        row[direction] = beside_one_gpu(call, one[direction], **effort._asdict())


def block_sparse_table(found: Mapping[str, Any]) -> str:
    """Return the results of block-sparse attention as Markdown."""
    ranks = found.get("sequence_ranks", 1)
    title = (
        f"{found['tokens']:,} causal tokens in blocks of {found['block_size']}, {found['heads']} query and "
        f"{found['kv_heads']} KV heads of {found['head_dim']}"
    )
    if ranks > 1:
        title += f", {found['layout']} over {ranks} ranks; ms, one GPU's ms, ratio to {ranks} times its speed:"
    else:
        title += "; ms, dense ms, ms over density x dense ms:"
    lines = []
    for row in found["rows"]:
        cells = [f"{row['density']:.1%}", row["kernel"]]
        cells += [f"{row['skipped']:.0%}" if "skipped" in row else "-"] if ranks > 1 else []
        lines.append([*cells, *_times(row, _COMPARED[ranks > 1], "{:.1f}, {:.1f}, {:.2f}")])
    skipped = ["partitions skipped"] if ranks > 1 else []
    return "\n".join([title, "", *markdown_table(["density", "kernel", *skipped, *DIRECTIONS], lines)])


def _times(row: Mapping[str, Any], compared: str, text: str) -> list[str]:
    """Return the cells of a row's directions: its time, the time compared with and their ratio, or its refusal."""
    found = (row.get(direction) for direction in DIRECTIONS)
    return [
        text.format(each["milliseconds"], each[compared], each["ratio"]) if each else row["refused"] for each in found
    ]


def errors_table(found: Mapping[str, Any]) -> str:
    """Return the errors of block-sparse kernels as Markdown."""
    title = (
        f"{found['tokens']:,} causal tokens in blocks of {found['block_size']}, {found['heads']} query and "
        f"{found['kv_heads']} KV heads; relative errors (L2), compared with float64:"
    )
    lines = [
        [row["head_dim"], f"{row['density']:.1%}", row["kernel"]]
        + [format(row[name], ".4f") if name in row else row["refused"] for name in RESULTS]
        for row in found["rows"]
    ]
    return "\n".join([title, "", *markdown_table(["head dim", "density", "kernel", *RESULTS], lines)])


def cross_table(found: Mapping[str, Any]) -> str:
    """Return the results of cross-attention as Markdown."""
    ranks = found["machine"]["ranks"]
    title = (
        f"{found['queries']:,} queries x {found['keys']:,} keys over {ranks} ranks, {found['heads']} query and "
        f"{found['kv_heads']} KV heads; ms, one GPU's ms on the whole, ratio to {ranks} times its speed:"
    )
    lines = [
        [
            *(row[name] for name in (*NAMES, "strategy", "transport")),
            *_times(row, _COMPARED[True], "{:.1f}, {:.1f}, {:.3f}"),
        ]
        for row in found["rows"]
    ]
    columns = ["mask", "layout of queries", "of keys", "strategy", "transport", *DIRECTIONS]
    return "\n".join([title, "", *markdown_table(columns, lines)])


BENCHMARKS = (
    RowBenchmark(
        name="block-sparse", about=__doc__, configure=_configure_sparse, measure=_block_sparse,
        table=block_sparse_table, ranks=1,
    ),
    RowBenchmark(
        name="block-sparse-errors", about=__doc__, configure=_configure_errors, measure=_block_sparse_errors,
        table=errors_table, ranks=1,
    ),
    RowBenchmark(
        name="cross", about=__doc__, configure=_configure_cross, measure=_cross, table=cross_table, ranks=2
    ),
)  # fmt: skip
