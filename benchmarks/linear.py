"""Measures recurrent layers over ranks beside one GPU's kernel: `bmburst bench linear --gpus 2`.

Each rank has `--tokens` tokens of one sequence, in bfloat16, with 32 heads of 128; queries and keys of the delta kinds
are normalized in the kernel. A row compares, in turns on the same GPUs:

- ours: the operator over all ranks, on the sequence of ranks * tokens;
- one GPU: fla's kernel alone on one rank's tokens (the same work a GPU, without ranks), each rank for itself.

The ratio is the time of one GPU divided by that of the ranks; 1 is ideal. Times are medians of the slowest rank, of the
forward pass with autograd and of both passes. Decays are "usual" (`logsigmoid` of a normal number, as in fla's
benchmarks) or "none" (0). `first` is the time of the first forward and backward of the process, with compilation and
tuning.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.engine.machine import RankGroup, start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, RowBenchmark
from benchmarks.engine.timing import Times, in_turns, once, quotient
from bmburst.amounts import tokens
from bmburst.comm.groups import communicator
from bmburst.linear.api import KINDS, burst_linear_attention

HEADS, DIM, TOKENS = 32, 128, (16_384, 65_536)
GATES = ("usual", "none")
REPEATS, SECONDS = 10, 5.0


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="default: all")
    add("--tokens", nargs="+", type=tokens, default=list(TOKENS), help="tokens a rank (default: 16K 64K)")
    add("--gates", nargs="+", default=["usual"], choices=GATES, help="default: usual")
    add("--layouts", nargs="+", default=["contiguous", "zigzag"], help="default: contiguous zigzag")
    add("--heads", type=int, default=HEADS, help=f"default: {HEADS}")
    add("--dim", type=int, default=DIM, help=f"of keys and values (default: {DIM})")
    add("--repeats", type=int, default=REPEATS, help=f"measured rounds (default: {REPEATS})")
    add("--kernel", default="auto", help="ours (default: auto)")


def _measure(options: argparse.Namespace) -> Measured:
    group = RankGroup.world(start_ranks())
    return {}, _measured(options, group)


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    rows = record["rows"]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return "\n".join(markdown_table(columns, ([_text(row.get(name, "")) for name in columns] for row in rows)))


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _inputs(kind: str, length: int, gates: str, options: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """Return random inputs of `length` tokens: in bfloat16 on a GPU, decays in fp32."""
    rng = torch.Generator(device).manual_seed(0)
    heads, dim = options.heads, options.dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, length, *shape, generator=rng, device=device)

    shape = (heads, dim) if kind == "kda" else (heads,)
    decay = draw(*shape)
    decays = {"usual": functional.logsigmoid(decay), "none": torch.zeros_like(decay)}
    values = [draw(heads, dim).bfloat16() for _ in range(3)]
    beta = [] if kind == "decay" else [draw(heads).sigmoid().bfloat16()]
    return [t.requires_grad_() for t in (*values, decays[gates], *beta)]


def _measured(options: argparse.Namespace, group: RankGroup) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind, number of tokens, kind of gates and layout."""
    from bmburst_ops.linear.fla_tuning import few_choices

    comm = communicator(None)
    for kind in options.kinds:
        module, name = {
            "gated_delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
            "kda": ("fla.ops.kda", "chunk_kda"),
            "decay": ("fla.ops.simple_gla", "chunk_simple_gla"),
        }[kind]
        theirs = getattr(__import__(module, fromlist=[name]), name)
        few_choices()
        for length in options.tokens:
            for gates in options.gates:
                mine = _inputs(kind, length, gates, options, group.device)
                for layout in options.layouts:
                    calls: dict[str, Callable[[], Any]] = {
                        "ours": partial(_ours, mine, kind=kind, layout=layout, group=comm, kernel=options.kernel),
                        "one GPU": partial(_fla, theirs, mine),
                    }
                    row = {"kind": kind, "heads": options.heads, "tokens a rank": length, "ranks": group.size}
                    row |= {"gates": gates, "layout": layout}
                    yield row | _compared(calls, mine, group, options.repeats)


def _ours(inputs: list[Tensor], **options: Any) -> Any:
    q, k, v, g, *beta = inputs
    return burst_linear_attention(q, k, v, g, *beta, **options)


def _fla(function: Callable[..., Any], inputs: list[Tensor]) -> Tensor:
    q, k, v, g, *beta = inputs
    options = {"beta": beta[0], "use_qk_l2norm_in_kernel": True} if beta else {}
    out: Tensor = function(q, k, v, g=g, **options)[0]
    return out


def _compared(
    calls: dict[str, Callable[[], Any]], inputs: list[Tensor], group: RankGroup, repeats: int
) -> dict[str, Any]:
    """Return times in milliseconds, and ratios to one GPU."""
    grad = torch.randn_like(inputs[2])

    def both(call: Callable[[], Any]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(), inputs, grad)

    found: dict[str, Any] = {"first s": once(both(calls["ours"]), group) / 1e3}
    for name, make in (("forward", lambda call: call), ("both", both)):
        times = in_turns(*map(make, calls.values()), group=group, repeats=repeats, seconds=SECONDS)
        by_name = dict(zip(calls, times, strict=True))
        for who, each in by_name.items():
            found[f"{who} {name} ms"] = Times.of(each).median
            if who != "one GPU":
                found[f"{who} {name} ratio"] = quotient(by_name["one GPU"], each)
    return found


BENCHMARKS = (RowBenchmark(name="linear", about=__doc__, configure=_configure, measure=_measure, table=table, ranks=2),)
