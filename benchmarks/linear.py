"""Measures recurrent layers over ranks beside one GPU's kernel: `bmburst bench linear --gpus 2`.

Each rank has `--tokens` tokens of one sequence, in bfloat16, with 32 heads of 128; queries and keys of the delta kinds
are normalized in the kernel. A row compares, in turns on the same GPUs:

- ours: the operator over all ranks, on the sequence of ranks * tokens;
- one GPU: fla's kernel alone on one rank's tokens (the same work a GPU, without ranks), each rank for itself;
- fla CP: with `--peers`, fla's own context parallelism on the same sequence, for the kinds that have it. It tunes
  further kernels, which takes minutes.

The ratio is the time of one GPU divided by that of the ranks; 1 is ideal. Times are medians of the slowest rank, of the
forward pass with autograd and of both passes. Decays are "usual" (`logsigmoid` of a normal number, as in fla's
benchmarks), "slow" (uniform in -0.1 to 0) or "none" (0). `first` is the time of the first forward and backward of the
process, with compilation and tuning. `--check` compares results of a
short sequence with the definition in fp64 instead.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.engine.machine import RankGroup, start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, RowBenchmark
from benchmarks.engine.timing import Times, in_turns, once, quotient
from benchmarks.fla_tuning import restrict_tuning
from bmburst.amounts import tokens
from bmburst.comm.groups import communicator
from bmburst.linear.api import KINDS, burst_linear_attention
from bmburst.sequence import shard, unshard

HEADS, DIM, TOKENS = 32, 128, (16_384, 65_536)
GATES = ("usual", "slow", "none")
REPEATS, SECONDS = 10, 5.0
NAMES = ("q", "k", "v", "g", "beta")


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="default: all")
    add("--tokens", nargs="+", type=tokens, default=list(TOKENS), help="tokens a rank (default: 16K 64K)")
    add("--gates", nargs="+", default=["usual", "slow"], choices=GATES, help="default: usual slow")
    add("--layouts", nargs="+", default=["contiguous", "zigzag"], help="default: contiguous zigzag")
    add("--heads", type=int, default=HEADS, help=f"default: {HEADS}")
    add("--dim", type=int, default=DIM, help=f"of keys and values (default: {DIM})")
    add("--repeats", type=int, default=REPEATS, help=f"measured rounds (default: {REPEATS})")
    add("--kernel", default="auto", help="ours (default: auto)")
    add("--peers", action="store_true", help="fla's context parallelism too")
    add("--check", action="store_true", help="compare with the definition in fp64")


def _measure(options: argparse.Namespace) -> Measured:
    group = RankGroup.world(start_ranks())
    return {}, (_checked if options.check else _measured)(options, group)


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
    decays = {"usual": functional.logsigmoid(decay), "slow": -0.1 * decay.sigmoid(), "none": torch.zeros_like(decay)}
    values = [draw(heads, dim).bfloat16() for _ in NAMES[:3]]
    beta = [] if kind == "decay" else [draw(heads).sigmoid().bfloat16()]
    return [t.requires_grad_() for t in (*values, decays[gates], *beta)]


def _checked(options: argparse.Namespace, group: RankGroup) -> Iterator[dict[str, Any]]:
    """Yield, for each kind and layout, the errors of the operator over ranks relative to the definition in fp64."""
    comm = communicator(None)
    length = 64 * 2 * group.size * 3 + 2 * group.size  # runs that end inside a chunk of the kernel
    for kind in options.kinds:
        for gates in options.gates:
            given = [t[:, :, :4].detach() for t in _inputs(kind, length, gates, options, group.device)]
            for layout in options.layouts:
                begun = time.perf_counter()
                ours = _results(kind, given, layout, comm)
                seconds = time.perf_counter() - begun
                exact = _results(kind, [t.double() for t in given], layout, comm)
                errors = {
                    name: float((a.double() - b).norm() / b.norm().clamp(min=1e-9))
                    for name, a, b in zip(("out", *NAMES), ours, exact, strict=False)
                }
                worst = max(errors, key=lambda name: errors[name])
                right = errors[worst] < 2e-2
                yield {"kind": kind, "gates": gates, "layout": layout, "ranks": group.size, "worst": worst} | {
                    "error": errors[worst], "right": right, "seconds": seconds
                }  # fmt: skip


def _results(kind: str, given: list[Tensor], layout: str, comm: Any) -> list[Tensor]:
    """Return the whole output and the whole gradients."""
    mine = [shard(t, layout=layout, group=comm).clone().requires_grad_() for t in given]
    out = burst_linear_attention(*mine, kind=kind, layout=layout, group=comm)
    assert isinstance(out, Tensor)
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=torch.float64)
    grads = torch.autograd.grad((out.double() * weights).sum(), mine)
    return [unshard(t.detach(), layout=layout, group=comm) for t in (out, *grads)]


def _measured(options: argparse.Namespace, group: RankGroup) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind, number of tokens, kind of gates and layout."""
    comm = communicator(None)
    for kind in options.kinds:
        module, name = {
            "gated_delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
            "kda": ("fla.ops.kda", "chunk_kda"),
            "decay": ("fla.ops.simple_gla", "chunk_simple_gla"),
        }[kind]
        theirs = getattr(__import__(module, fromlist=[name]), name)
        restrict_tuning()
        for length in options.tokens:
            for gates in options.gates:
                mine = _inputs(kind, length, gates, options, group.device)
                for layout in options.layouts:
                    calls: dict[str, Callable[[], Any]] = {
                        "ours": partial(_ours, mine, kind=kind, layout=layout, group=comm, kernel=options.kernel),
                        "one GPU": partial(_fla, theirs, mine),
                    }
                    if options.peers and kind != "decay" and group.size > 1:
                        context = fla_context(length * group.size, layout, group.device)
                        calls["fla CP"] = partial(_fla, theirs, mine, cp_context=context)
                    row = {"kind": kind, "heads": options.heads, "tokens a rank": length, "ranks": group.size}
                    row |= {"gates": gates, "layout": layout}
                    yield row | _compared(calls, mine, group, options.repeats)


def _ours(inputs: list[Tensor], **options: Any) -> Any:
    q, k, v, g, *beta = inputs
    return burst_linear_attention(q, k, v, g, *beta, **options)


def _fla(function: Callable[..., Any], inputs: list[Tensor], **options: Any) -> Tensor:
    q, k, v, g, *beta = inputs
    if beta:
        options |= {"beta": beta[0], "use_qk_l2norm_in_kernel": True}
    out: Tensor = function(q, k, v, g=g, **options)[0]
    return out


def fla_context(length: int, layout: str, device: torch.device, width: int | None = None) -> Any:
    """Return the context of fla's context parallelism over all ranks, for one sequence.

    `width` is the number of tokens that a convolution reads, if it is one.
    """
    from fla.ops.cp import build_cp_context  # type: ignore[import-not-found]

    edges = torch.tensor([0, length], dtype=torch.int64, device=device)
    return build_cp_context(cu_seqlens=edges, group=dist.group.WORLD, conv1d_kernel_size=width, layout=layout)


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


BENCHMARKS = (
    RowBenchmark(
        name="linear", about=__doc__, configure=_configure, measure=_measure, table=table, ranks=2,
        is_wrong=lambda row: not row.get("right", True),
    ),
)  # fmt: skip
