"""Measures operators of a training step on one GPU: `bmburst bench WHAT`.

Times are medians by CUDA events; caches are flushed between calls by writing 512 MiB, or 4 GiB for step-parts. WHAT is
one of:

elementwise: norm, activation and rotary embedding, compared with a copy. GB/s are the bytes that an operator must read
and write (each tensor once) divided by the time. `copy` is a `Tensor.copy_` that reads and writes the same number of
bytes: the memory bandwidth. `plain` is the operator in plain torch, on fewer tokens (`--plain-tokens`), because it
makes copies.

step-parts: parts of a step, each in several implementations. The first one is simple: the head's gradient accumulated
chunk by chunk, products and norms as separate operations whose gradients autograd adds, BMTrain's AdamW. The others are
the code that `bmburst train` runs, and alternatives to it. `ms a step` is the time multiplied by the number of calls
per step, including recomputation under block-keep-attention.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, Row, RowBenchmark
from benchmarks.engine.timing import median_seconds
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import PRESETS
from bmburst_ops import fused, rms_norm, rotary, swiglu
from bmburst_ops.linear_cross_entropy import linear_cross_entropy
from bmburst_ops.linears import add_product, linears

_FLUSH = 1 << 29  # bytes, ten times the L2 of an H200
Way = Callable[[], Sequence[Tensor]]
RATES: Mapping[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_EPS = 1e-5


class Operator(NamedTuple):
    """An operator: its name, its call, and the bytes that it must read and write."""

    name: str
    call: Callable[[], object]
    nbytes: int


def _configure(parser: argparse.ArgumentParser, tokens: int, repeats: int) -> None:
    add = parser.add_argument
    add("--model", default="llama-3-8b", choices=PRESETS, help="preset of the shape (default: llama-3-8b)")
    add("--tokens", type=int, default=tokens, help=f"tokens of one rank (default: {tokens})")
    add("--repeats", type=int, default=repeats, help=f"measured calls (default: {repeats})")


def _configure_elementwise(parser: argparse.ArgumentParser) -> None:
    _configure(parser, tokens=131072, repeats=20)
    add = parser.add_argument
    add("--plain-tokens", type=int, default=16384, help="tokens for plain torch; 0 skips it (default: 16384)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))


def _configure_step_parts(parser: argparse.ArgumentParser) -> None:
    _configure(parser, tokens=16384, repeats=10)
    parser.add_argument("--ranks", type=int, default=2, help="ranks that shard the weights (default: 2)")


def _elementwise(options: argparse.Namespace) -> Measured:
    """Measure the operators with kernels and in plain torch."""
    is_fused = fused.triton_twin("triton_elementwise", torch.empty(1, device="cuda")) is not None
    names = ("model", "tokens", "plain_tokens", "dtype", "repeats")
    facts = {name: getattr(options, name) for name in names} | {"ours": "Triton" if is_fused else "plain torch"}
    return facts, _bandwidths_of_both(options)


def _bandwidths_of_both(options: argparse.Namespace) -> Iterator[Row]:
    yield from ({"who": "ours", **row} for row in _bandwidths(options, options.tokens))
    if options.plain_tokens:
        for module in (rms_norm, rotary, swiglu):
            module.triton_twin = lambda *_: None  # type: ignore[attr-defined]
        yield from ({"who": "plain", **row} for row in _bandwidths(options, options.plain_tokens))


def _bandwidths(options: argparse.Namespace, tokens: int) -> Iterator[Row]:
    dtype = getattr(torch, options.dtype)
    scratch = torch.empty(_FLUSH, dtype=torch.uint8, device="cuda")
    for operator in _operators(PRESETS[options.model], tokens, dtype):
        ((seconds, _),) = median_seconds([operator.call], scratch, repeats=options.repeats, warm_up=3)
        source, target = (torch.empty(operator.nbytes // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
        ((copied, _),) = median_seconds([partial(target.copy_, source)], scratch, repeats=options.repeats, warm_up=3)
        yield {
            "operator": operator.name,
            "milliseconds": 1e3 * seconds,
            "gigabytes_per_second": operator.nbytes / seconds / 1e9,
            "copy_gigabytes_per_second": operator.nbytes / copied / 1e9,
        }


def elementwise_table(record: Mapping[str, Any]) -> str:
    """Return a record of elementwise operators as Markdown."""
    lines = []
    for row in record["rows"]:
        speed, copy = row["gigabytes_per_second"], row["copy_gigabytes_per_second"]
        cells = [f"{row['milliseconds']:.3f}", f"{speed:.0f}", f"{copy:.0f}", f"{speed / copy:.2f}"]
        lines.append([f"{row['who']}: {row['operator']}", *cells])
    table = markdown_table(["operator", "ms", "GB/s", "copy", "share"], lines)
    return "\n".join([f"ours: {record['ours']}", "", *table])


def _operators(model: Any, tokens: int, dtype: torch.dtype) -> Iterator[Operator]:
    """Yield each operator on its own tensors, which are freed before the next one is created."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    x, weight = random(1, tokens, model.hidden_size).requires_grad_(), random(model.hidden_size).requires_grad_()
    yield from _both("norm", lambda x, w: rms_norm.rms_norm(x, w, 1e-5), (x, weight), x.nbytes, 2, 3)
    gate, up = (random(1, tokens, model.intermediate_size).requires_grad_() for _ in range(2))
    yield from _both("swiglu", swiglu.swiglu, (gate, up), gate.nbytes, 3, 5)
    overwriting = lambda gate, up: swiglu.swiglu(gate, up, overwrite_grad=True)  # noqa: E731
    yield from list(_both("swiglu, overwriting", overwriting, (gate, up), gate.nbytes, 3, 5))[1:]
    del gate, up
    angle = torch.rand(1, tokens, model.head_dim // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    turn = lambda x: rotary.apply_rotary(x, cos, sin)  # noqa: E731
    query, heads = model.num_heads, model.num_heads + model.num_kv_heads
    projected = random(1, tokens, heads + model.num_kv_heads, model.head_dim)
    for name, part in (
        ("rotary, queries", random(1, tokens, query, model.head_dim)),
        ("rotary, keys", random(1, tokens, model.num_kv_heads, model.head_dim)),
        ("rotary, both out of one projection", projected[:, :, :heads]),
    ):
        tables = cos.nbytes + sin.nbytes
        yield from _both(name, turn, (part.requires_grad_(),), part.numel() * part.itemsize, 2, 2, extra=tables)


def _both(
    name: str, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], nbytes: int, forward: int, backward: int,
    *, extra: int = 0,
) -> Iterator[Operator]:  # fmt: skip
    """Yield forward and backward of a function.

    `forward` and `backward` are the numbers of tensors of `nbytes` that they read and write, `extra` are further bytes
    that each reads.
    """
    yield Operator(f"{name}, forward", lambda: function(*(x.detach() for x in inputs)), forward * nbytes + extra)
    result = function(*inputs)
    grad = torch.randn_like(result)
    yield Operator(
        f"{name}, backward",
        lambda: torch.autograd.grad(result, inputs, grad, retain_graph=True),
        backward * nbytes + extra,
    )


class StepPart(NamedTuple):
    """A part of a step, in several implementations."""

    name: str  # name of the part
    ways: Mapping[str, Way]  # implementations by name. All return the same tensors, so that tests can compare them.
    times: int  # calls per step
    flops: float = 0.0  # FLOPs of the products of one call
    nbytes: float = 0.0  # bytes that one call must read and write; 0 if products dominate


def _step_parts(options: argparse.Namespace) -> Measured:
    """Measure the implementations of each part."""
    facts = {name: getattr(options, name) for name in ("model", "tokens", "ranks", "repeats")}
    found = parts(PRESETS[options.model], options.tokens, options.ranks, torch.device("cuda"))
    return facts, (row for part in found for row in _measured(part, options.repeats))


def parts(model: LlamaConfig, tokens: int, ranks: int, device: torch.device) -> Iterator[StepPart]:
    """Yield each part on its own tensors, which are freed before the next one is created."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    yield from _head(model, tokens, random)
    yield from _sums(model, tokens, random)
    yield from _shared_inputs(model, tokens, random)
    yield from _norms(model, tokens, random)
    yield from _adam(model, ranks, random)


Random = Callable[..., Tensor]


def _head(model: LlamaConfig, tokens: int, random: Random) -> Iterator[StepPart]:
    hidden, weight = random(tokens, model.hidden_size), random(model.vocab_size, model.hidden_size) / 64
    labels = torch.arange(tokens, device=hidden.device) * 7 % model.vocab_size
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def way(gathered: int) -> Sequence[Tensor]:
        return torch.autograd.grad(linear_cross_entropy(*leaves, labels, gathered=gathered), leaves)

    ways = {f"{gathered} chunks at once": partial(way, gathered) for gathered in (1, 2, 4, 8)}
    yield StepPart("head and loss, with gradients", ways, 1, flops=6.0 * tokens * weight.numel())


def _sums(model: LlamaConfig, tokens: int, random: Random) -> Iterator[StepPart]:
    """Yield the weight gradient of the head."""
    grads, states = random(tokens, model.vocab_size), random(tokens, model.hidden_size)
    total = torch.zeros(model.vocab_size, model.hidden_size, device=grads.device)

    def way(rows: int) -> Sequence[Tensor]:
        total.zero_()  # every implementation includes the time of this fill
        for start in range(0, tokens, rows):
            add_product(total, grads[start : start + rows].t(), states[start : start + rows])
        return (total,)

    ways = {f"{rows} tokens at once": partial(way, rows) for rows in (1024, 2048, 4096, 8192)}
    yield StepPart("head's weight gradient", ways, 1, flops=2.0 * tokens * total.numel())


def _shared_inputs(model: LlamaConfig, tokens: int, random: Random) -> Iterator[StepPart]:
    """Yield the backward of linear layers that share an input: gradients of the input and the weights."""
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for name, widths in (("q, k, v", (query, kv, kv)), ("gate, up", (model.intermediate_size,) * 2)):
        x = random(1, tokens, model.hidden_size).requires_grad_()
        weights = [(random(width, model.hidden_size) / 64).requires_grad_() for width in widths]
        grads = [random(1, tokens, width) for width in widths]
        results = {
            "one by one": tuple(linears(x, [weight])[0] for weight in weights),
            "added inside of products": linears(x, weights),
        }
        ways = {
            way: partial(torch.autograd.grad, given, (x, *weights), grads, retain_graph=True)
            for way, given in results.items()
        }
        flops = 4.0 * tokens * model.hidden_size * sum(widths)
        yield StepPart(f"{name}, backward", ways, model.num_layers, flops=flops)


def _norms(model: LlamaConfig, tokens: int, random: Random) -> Iterator[StepPart]:
    """Yield the sum of stream and attention's output with the norm before the MLP, and the norm before attention."""
    x, added, *grads = (random(1, tokens, model.hidden_size) for _ in range(4))
    weight = random(model.hidden_size).requires_grad_()
    x.requires_grad_(), added.requires_grad_()

    def apart(with_added: bool) -> tuple[Tensor, Tensor]:
        stream = x + added if with_added else x
        return stream, rms_norm.rms_norm(stream, weight, _EPS)

    def joined(with_added: bool) -> tuple[Tensor, Tensor]:
        return rms_norm.stream_norm(x, added if with_added else None, weight, _EPS)

    def detached(function: Callable[[bool], tuple[Tensor, Tensor]]) -> Sequence[Tensor]:
        with torch.no_grad():
            return function(True)

    named = {"apart": apart, "in one pass": joined}
    ways = {name: partial(detached, function) for name, function in named.items()}
    yield StepPart("sum and norm, forward", ways, 2 * model.num_layers, nbytes=4.0 * x.nbytes)
    for with_added, name in ((True, "sum and norm, backward"), (False, "norm beside a stream, backward")):
        leaves = (x, added, weight) if with_added else (x, weight)
        backward = {
            way: partial(torch.autograd.grad, function(with_added), leaves, grads, retain_graph=True)
            for way, function in named.items()
        }
        yield StepPart(name, backward, model.num_layers, nbytes=4.0 * x.nbytes)


def _adam(model: LlamaConfig, ranks: int, random: Random) -> Iterator[StepPart]:
    """Yield AdamW on a quarter of a rank's weights, with four calls per step."""
    numbers = model.num_parameters // ranks // 4
    weights, gradient = random(numbers), random(numbers)
    if not weights.is_cuda or any(find_spec(name) is None for name in ("triton", "bmtrain")):
        return
    from bmtrain.optim import _function

    from bmburst_ops.triton_elementwise import adamw_

    def state() -> tuple[Tensor, ...]:
        return weights.float(), weights.clone(), torch.zeros_like(weights).float(), torch.zeros_like(weights).float()

    def bmtrain(master: Tensor, low: Tensor, mean: Tensor, square: Tensor) -> Sequence[Tensor]:
        rates = (*RATES["betas"], RATES["eps"], RATES["lr"], 1.0, RATES["weight_decay"], 10)
        _function.adam_bf16(master, low, gradient, mean, square, *rates)
        return master, mean, square

    def ours(master: Tensor, low: Tensor, mean: Tensor, square: Tensor) -> Sequence[Tensor]:
        adamw_(master, low, gradient, mean, square, **RATES, step=10, scale=1.0)
        return master, mean, square

    ways: dict[str, Way] = {"BMTrain's": partial(bmtrain, *state()), "Triton": partial(ours, *state())}
    yield StepPart("AdamW", ways, 4, nbytes=28.0 * numbers)


def _measured(part: StepPart, repeats: int) -> Iterator[Row]:
    """Yield the median time of each implementation on the GPU."""
    # Filling 4 GiB takes a millisecond, which covers the time in which autograd launches its kernels.
    scratch = torch.empty(8 * _FLUSH, dtype=torch.uint8, device="cuda")
    for way, (seconds, _) in zip(
        part.ways, median_seconds(list(part.ways.values()), scratch, repeats=repeats, warm_up=2), strict=True
    ):
        yield {
            "part": part.name,
            "way": way,
            "milliseconds": 1e3 * seconds,
            "milliseconds_a_step": 1e3 * seconds * part.times,
            "teraflops": part.flops / seconds / 1e12,
            "gigabytes_per_second": part.nbytes / seconds / 1e9,
        }


def step_parts_table(record: Mapping[str, Any]) -> str:
    """Return a record of the parts of a step as Markdown."""
    lines = []
    for row in record["rows"]:
        numbers = [f"{row[name]:.2f}" for name in ("milliseconds", "milliseconds_a_step")]
        rates = [f"{row[name]:.1f}" if row[name] else "" for name in ("teraflops", "gigabytes_per_second")]
        lines.append([row["part"], row["way"], *numbers, *rates])
    return "\n".join(markdown_table(["part", "way", "ms", "ms a step", "TFLOP/s", "GB/s"], lines))


BENCHMARKS = (
    RowBenchmark(
        name="elementwise", about=__doc__, configure=_configure_elementwise, measure=_elementwise,
        table=elementwise_table, needs_gpu=True,
    ),
    RowBenchmark(
        name="step-parts", about=__doc__, configure=_configure_step_parts, measure=_step_parts, table=step_parts_table,
        needs_gpu=True,
    ),
)  # fmt: skip
