"""Measures parts of a training step on one GPU, each in several ways: `python -m benchmarks.step_parts`.

The first way of each part is the simple one: the head's gradient accumulated a chunk at a time, products and norms as
separate operations whose gradients autograd adds, BMTrain's AdamW. The others are the code that `bmburst train` runs,
and alternatives to it. `ms a step` is the time multiplied by the number of calls per step, including recomputation
under block-keep-attention. Times are medians by CUDA events; caches are flushed between calls by writing 4 GiB.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.elementwise import FLUSH
from benchmarks.engine.machine import require_gpu, write_record
from benchmarks.engine.timing import median_seconds
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import PRESETS
from bmburst_ops.linear_cross_entropy import linear_cross_entropy
from bmburst_ops.linears import add_product, linears
from bmburst_ops.rms_norm import rms_norm, stream_norm

Way = Callable[[], Sequence[Tensor]]
RATES: Mapping[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_EPS = 1e-5


class StepPart(NamedTuple):
    """What of a step is done in several ways.

    Attributes:
        name: What it is.
        ways: By name, the same results each: tensors, to be compared.
        times: How often a step does it.
        flops: Of products, once.
        nbytes: That the leanest way has to read and write, once; 0 where products decide.
    """

    name: str
    ways: Mapping[str, Way]
    times: int
    flops: float = 0.0
    nbytes: float = 0.0


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=PRESETS, help="its widths (default: llama-3-8b)")
    parser.add_argument("--tokens", type=int, default=16384, help="of one rank (default: 16384)")
    parser.add_argument("--ranks", type=int, default=2, help="that share the weights (default: 2)")
    parser.add_argument("--repeats", type=int, default=10, help="calls that are measured (default: 10)")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    require_gpu("benchmarks.step_parts")
    found = {}
    print("| part | way | ms | ms a step | TFLOP/s | GB/s |\n|---|---|---|---|---|---|")
    for part in parts(PRESETS[options.model], options.tokens, options.ranks, torch.device("cuda")):
        found[part.name] = {name: _row(part, name, each) for name, each in _measured(part, options.repeats).items()}
    write_record(options.output, "benchmarks.step_parts", options=vars(options) | {"output": None}, results=found)
    return 0


def parts(model: LlamaConfig, tokens: int, ranks: int, device: torch.device) -> Iterator[StepPart]:
    """Each part on tensors of its own, given back before the next one's are made.

    Args:
        model: Its widths.
        tokens: Of one rank.
        ranks: That share the weights.
        device: Where it runs.
    """

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
    """The head's weight gradient alone."""
    grads, states = random(tokens, model.vocab_size), random(tokens, model.hidden_size)
    total = torch.zeros(model.vocab_size, model.hidden_size, device=grads.device)

    def way(rows: int) -> Sequence[Tensor]:
        total.zero_()  # its time is in each: a fill of the sum
        wide = total if total.is_cuda else total.float()
        for start in range(0, tokens, rows):
            add_product(wide, grads[start : start + rows].t(), states[start : start + rows])
        return (wide,)

    ways = {f"{rows} tokens at once": partial(way, rows) for rows in (1024, 2048, 4096, 8192)}
    yield StepPart("head's weight gradient", ways, 1, flops=2.0 * tokens * total.numel())


def _shared_inputs(model: LlamaConfig, tokens: int, random: Random) -> Iterator[StepPart]:
    """Backward of what reads one input: its gradient and those of the weights."""
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
    """The norm in front of the MLP, with what attention adds, and the one in front of attention."""
    x, added, *grads = (random(1, tokens, model.hidden_size) for _ in range(4))
    weight = random(model.hidden_size).requires_grad_()
    x.requires_grad_(), added.requires_grad_()

    def apart(with_added: bool) -> tuple[Tensor, Tensor]:
        stream = x + added if with_added else x
        return stream, rms_norm(stream, weight, _EPS)

    def joined(with_added: bool) -> tuple[Tensor, Tensor]:
        return stream_norm(x, added if with_added else None, weight, _EPS)

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
    """AdamW of a quarter of a rank's weights, which stand for all."""
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


def _measured(part: StepPart, repeats: int) -> dict[str, float]:
    """Return the median of each way's times on the GPU, in seconds."""
    scratch = torch.empty(8 * FLUSH, dtype=torch.uint8, device="cuda")  # a millisecond: autograd launches within it
    seconds = median_seconds(list(part.ways.values()), scratch, repeats=repeats, warm_up=2)
    return {name: on_gpu for name, (on_gpu, _) in zip(part.ways, seconds, strict=True)}


def _row(part: StepPart, way: str, seconds: float) -> dict[str, float]:
    """Print a line of the table, and return its numbers."""
    flops, speed = part.flops / seconds / 1e12, part.nbytes / seconds / 1e9
    found = {"milliseconds": 1e3 * seconds, "milliseconds_a_step": 1e3 * seconds * part.times}
    numbers = " | ".join(f"{value:8.2f}" for value in found.values())
    print(f"| {part.name} | {way} | {numbers} | {flops or '':.5} | {speed or '':.6} |", flush=True)
    return found | {"teraflops": flops, "gigabytes_per_second": speed}


if __name__ == "__main__":
    sys.exit(main())
