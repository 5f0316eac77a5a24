"""Measures time and memory of `token_logprobs`: `bmburst bench logprobs --gpus 2`.

The model is MiniCPM-2B with a larger vocabulary, in bfloat16 with random weights, and one sequence is split over all
ranks. Three passes are measured: log-probabilities of all tokens without gradients, as for a reference model;
log-probabilities with the backward pass of a loss with per-token weights, as in DPO or GRPO; and, for comparison, the
mean loss of the tokens. A time is the median on the slowest rank. Memory is the largest peak of torch's allocator over
the ranks, with weights and gradients but without an optimizer. `--small` is a tiny case, which also runs on a CPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, RowBenchmark
from bmburst.amounts import GIB
from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import PRESETS
from bmburst.launch.start import start

BASE, VOCABULARY, TOKENS = "minicpm-2b", 130_560, 131_072
POLICY = "block-keep-attention"
WARM_UP, REPEATS = 2, 5


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=int, default=TOKENS, help=f"tokens of the sequence (default: {TOKENS})")
    add("--recompute", default=POLICY, help=f"recompute policy (default: {POLICY})")
    add("--repeats", type=int, default=REPEATS, help=f"measured passes (default: {REPEATS})")
    add("--small", action="store_true", help="two layers and short sequences, for a quick test")


def _measure(options: argparse.Namespace) -> Measured:
    runtime = start(seed=0)
    tokens = min(options.tokens, 512) if options.small else options.tokens
    model = _shape(tokens, small=options.small)
    facts = {"tokens": tokens, "recompute": options.recompute, "parameters": model.num_parameters}
    rows = _measured(model, tokens, options.recompute, options.repeats, runtime.device)
    return facts | {"vocabulary": model.vocab_size}, rows


def _shape(tokens: int, *, small: bool) -> LlamaConfig:
    """Return the measured model."""
    model = replace(PRESETS[BASE], vocab_size=VOCABULARY, max_position_embeddings=max(tokens, 4096))
    sizes: dict[str, Any] = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
    }
    return replace(model, **sizes, num_kv_heads=4, head_dim=16) if small else model


def _measured(
    shape: LlamaConfig, tokens: int, recompute: str, repeats: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of pass. All ranks must call it."""
    import bmtrain as bmt

    from bmburst.attention.module import BurstAttention
    from bmburst.blocks.model import Llama
    from bmburst.mesh import Mesh
    from bmburst.sequence import SequenceShard

    mesh = Mesh.over_bmtrain()
    cut = SequenceShard.cut(tokens, layout="zigzag", group=mesh.sequence)
    attention = partial(BurstAttention, group=mesh.sequence)
    model = Llama(shape, attention=attention, dtype=torch.bfloat16, recompute=recompute)
    manager = bmt.optim.OptimManager(loss_scale=None)
    # Each rank generates the whole sequence, and takes its part.
    ids = torch.randint(shape.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    part = cut.batch(ids)
    factors = torch.rand(part.labels.shape, device=device) - 0.5

    def logprobs() -> Tensor:
        return 0 - model.loss(part.tokens, part.positions, part.labels, tokens, per_token=True)

    def without_gradients() -> None:
        with torch.no_grad():
            logprobs()

    def with_backward() -> None:
        manager.backward((logprobs() * factors).sum() / tokens)

    def of_the_mean() -> None:
        manager.backward(model.loss(part.tokens, part.positions, part.labels, tokens) / tokens)

    passes: dict[str, Callable[[], None]] = {
        "log-probabilities, forward": without_gradients,
        "log-probabilities, forward and backward": with_backward,
        "mean loss, forward and backward": of_the_mean,
    }
    for name, work in passes.items():
        seconds = []
        for number in range(WARM_UP + repeats):
            for parameter in model.parameters():
                parameter.grad = None
            if number == WARM_UP and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            bmt.synchronize()
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        own = torch.tensor([[*seconds[WARM_UP:], peak]], dtype=torch.float64, device=device)
        (everywhere,) = mesh.world.all_gather(own).wait()
        *times, memory = everywhere.flatten(0, 1).amax(0).tolist()
        yield {"pass": name, "seconds": statistics.median(times), "peak_gib": memory / GIB}


def table(found: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    ranks = found["machine"]["ranks"]
    title = (
        f"{found['tokens']:,} tokens over {ranks} ranks, {found['parameters'] / 1e9:.2f}B parameters, a vocabulary of "
        f"{found['vocabulary']:,}, recompute {found['recompute']}:"
    )
    lines = []
    for row in found["rows"]:
        pace = found["tokens"] / ranks / row["seconds"]
        memory = f"{row['peak_gib']:.2f}" if row["peak_gib"] else "-"
        lines.append([row["pass"], f"{row['seconds']:.3f}", f"{pace:,.0f}", memory])
    return "\n".join([title, "", *markdown_table(["pass", "s", "tokens/s a rank", "GiB at most"], lines)])


BENCHMARKS = (
    RowBenchmark(name="logprobs", about=__doc__, configure=_configure, measure=_measure, table=table, ranks=2),
)
