"""Measures time and memory of training a transformers model on split sequences with FSDP2.

    bmburst bench hugging-face --gpus 2 --tokens 32K,128K --compile --output found.json

`torchrun --nproc-per-node 2 -m bmburst bench hugging-face` starts the same ranks.

The step is that of docs/hugging_face.md: attn_implementation="bmburst", `SplitSequences`, `recompute`, FSDP2 around
each decoder layer, gradient clipping and fused AdamW. Weights and optimizer states are fp32 and sharded, 16 bytes per
weight over all ranks; layers compute in bfloat16 (`MixedPrecisionPolicy`). Weights are random, created on the meta
device and filled shard by shard. All ranks share one sequence of random tokens. Times are medians of whole steps on
the slowest rank, in which the host waits for the loss, like a script that prints it. Peaks are those of torch's
allocator.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import bmburst
from benchmarks.engine.machine import start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, RowBenchmark
from bmburst.amounts import GIB, numbers, short, tokens
from bmburst.blocks.presets import PRESETS
from bmburst.errors import first_line
from bmburst.integrations.transformers import SplitSequences, recompute, register
from bmburst.integrations.transformers_recurrent import mixers

TRAINERS: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "bmburst train": MappingProxyType({32768: 6742.0, 131072: 3442.0}),
        "DeepSpeed ALST": MappingProxyType({32768: 4609.0, 131072: 2399.0}),
    }
)
"""Tokens/s per GPU of trainers by tokens: all layers of llama-3-8b on 2 H200s, measured 2026-11-22."""


class Cell(NamedTuple):
    """A measurement: tokens per step, and whether layers are compiled."""

    tokens: int
    compiled: bool


class Training:
    """A model under FSDP2 with its optimizer."""

    def __init__(
        self,
        config: PreTrainedConfig,
        device: torch.device,
        *,
        policy: str,
        keep_gathered: bool = False,
        lr: float = 1e-5,
        layout: str = "zigzag",
    ) -> None:
        self.mesh = bmburst.Mesh.over_process_group()
        self.split = SplitSequences(self.mesh, layout=layout)
        self.model = random_model(config, "bmburst")
        recompute(self.model, policy)
        self.num_weights = sum(weight.numel() for weight in self.model.parameters())
        shard(self.model, device, keep_gathered=keep_gathered)
        fill(self.model, device)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)

    def compile(self) -> None:
        """Compile the submodules of each layer, but not the layer, which has the hooks of FSDP2 and checkpointing.

        A recurrent layer on a split sequence runs outside of graphs, so its norm is compiled instead.
        """
        for layer in decoder_layers(self.model):
            for part in layer.children():
                inner: Any = part.norm if mixers(part) else part
                inner.compile(dynamic=False)

    def step(self, ids: Tensor, split: SplitSequences | None = None) -> float:
        """Train one step on `[1, length]` token ids and return the mean loss in nats per token.

        `split` splits them; by default over all ranks.
        """
        split = split or self.split
        loss = split.part(ids).loss(self.model)
        loss.backward()
        self.update()
        return split.mean(loss.detach())

    def update(self) -> None:
        """Clip the gradients, update the weights, and clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="llama-3-8b", choices=PRESETS, help="preset of the shape (default: llama-3-8b)")
    add("--layers", type=int, help="number of layers (default: that of the preset)")
    add("--tokens", default="32K,128K", help="lengths of the sequence (default: 32K,128K)")
    add("--recompute", default="block-keep-attention", help="policy (default: block-keep-attention)")
    add("--keep-gathered", action="store_true", help="pass reshard_after_forward=False to FSDP2")
    add("--compile", action="store_true", help="also measure each length with compiled layers")
    add("--only-compiled", action="store_true", help="measure with compiled layers only")
    add("--steps", type=int, default=5, help="measured steps (default: 5)")
    add("--warmup", type=int, default=2, help="warm-up steps (default: 2)")


def _measure(options: argparse.Namespace) -> Measured:
    lengths = numbers("--tokens", options.tokens, tokens)
    device = start_ranks()
    register()
    began = time.perf_counter()
    training = Training(
        shape_of(options.model, options.layers), device, policy=options.recompute, keep_gathered=options.keep_gathered
    )
    facts: dict[str, Any] = {
        "model": options.model,
        "layers": training.model.config.num_hidden_layers,
        "parameters": training.num_weights,
        "recompute": options.recompute,
        "reshard_after_forward": not options.keep_gathered,
        "transformers": transformers.__version__,
        "seconds_to_start": time.perf_counter() - began,
    }
    kinds = [True] if options.only_compiled else [False, True] if options.compile else [False]
    return facts, measured(training, [Cell(n, kind) for kind in kinds for n in lengths], options.steps, options.warmup)


def shape_of(preset: str, layers: int | None) -> PreTrainedConfig:
    """Return the configuration of a preset."""
    values = PRESETS[preset].to_hugging_face() | ({} if layers is None else {"num_hidden_layers": layers})
    return AutoConfig.for_model(**values | {"use_cache": False})


def random_model(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Return a model on the meta device, without weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    return model


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the decoder layers in order."""
    return list(model.get_decoder().layers)


def shard(model: PreTrainedModel, device: torch.device, *, keep_gathered: bool) -> None:
    """Wrap each decoder layer and the model by FSDP2. In forward, each layer prefetches the next one's weights."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device.type == "cuda" else MixedPrecisionPolicy()
    layers = decoder_layers(model)
    for layer in layers:
        fully_shard(layer, mp_policy=precision, reshard_after_forward=not keep_gathered)
    fully_shard(model, mp_policy=precision)
    for layer, after in pairwise(layers):
        layer.set_modules_to_forward_prefetch([after])  # type: ignore[operator]  # a method that fully_shard adds


def fill(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate a meta model on a device, fill this rank's shards with random weights, and create the rotary embedding.

    Weights are normal with the configuration's `initializer_range`; those of norms are 1.
    """
    model.to_empty(device=device)
    torch.manual_seed(0)  # the same on all ranks, since unsharded tensors must be equal
    std = model.config.initializer_range
    with torch.no_grad():
        for name, weight in model.named_parameters():
            shard = weight.to_local() if isinstance(weight, DTensor) else weight
            shard.fill_(1.0) if weight.dim() == 1 and "norm" in name else shard.normal_(std=std)
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config).to(device)


def measured(training: Training, cells: list[Cell], steps: int, warmup: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each cell, up to the first that runs out of memory. All ranks must call it."""
    compiled = False
    for cell in cells:
        if cell.compiled and not compiled:
            training.compile()
            compiled = True
        try:
            yield _row(training, cell, steps, warmup)
        except torch.OutOfMemoryError as error:  # all ranks need the same memory, so all of them stop
            yield cell._asdict() | {"out_of_memory": first_line(error)}
            return


def _row(training: Training, cell: Cell, steps: int, warmup: int) -> dict[str, Any]:
    vocabulary, world = training.model.config.vocab_size, training.mesh.world
    ids = torch.randint(vocabulary, (1, cell.tokens), generator=torch.Generator().manual_seed(0))
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    seconds, losses = timed(partial(training.step, ids), warmup, steps)
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if on_gpu else [0, 0]
    own = torch.tensor([[*seconds, *peaks]], dtype=torch.float64, device=world.device)
    *times, allocated, reserved = world.all_gather(own).wait()[0].flatten(0, -2).amax(0).tolist()
    median = statistics.median(times[warmup:])
    return cell._asdict() | {
        "seconds": median,
        "seconds_of_steps": times,
        "tokens_per_second_a_rank": cell.tokens / world.size / median,
        "peak_allocated_gib": allocated / GIB,
        "peak_reserved_gib": reserved / GIB,
        "losses": losses,
        "labels": int(training.split.valid(training.split.part(ids))),
    }


def timed(step: Callable[[], float], warmup: int, steps: int) -> tuple[list[float], list[float]]:
    """Return seconds and loss of each step, including warm-up. Ranks start each step together.

    Warm-up is excluded from torch's peak memory, which is reset after it.
    """
    seconds, losses = [], []
    on_gpu = torch.cuda.is_available()
    for number in range(warmup + steps):
        if on_gpu and number == warmup:
            torch.cuda.reset_peak_memory_stats()
        if dist.is_initialized():
            dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        losses.append(step())
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds, losses


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row in one line, printed when a cell is done."""
    name = f"{short(row['tokens'])}{', compiled' if row['compiled'] else ''}"
    if "out_of_memory" in row:
        return f"{name}: out of memory: {row['out_of_memory']}"
    times = ", ".join(f"{each:.3f}" for each in row["seconds_of_steps"])
    return (
        f"{name}: {row['seconds']:.3f} s a step ({times}), {row['tokens_per_second_a_rank']:,.0f} tokens/s a GPU, "
        f"{row['peak_allocated_gib']:.1f} GiB allocated, {row['peak_reserved_gib']:.1f} reserved, "
        f"loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}"
    )


def table(found: Mapping[str, Any]) -> str:
    """Return a record as Markdown, with speedups over `TRAINERS` for the setting in which those were measured."""
    ranks, device = found["machine"]["ranks"], found["machine"]["device"]
    is_comparable = ranks == 2 and "H200" in device and found["model"] == "llama-3-8b" and found["layers"] == 32
    title = (
        f"{found['model']}, {found['layers']} layers, {found['parameters'] / 1e9:.2f}B parameters by transformers "
        f"{found['transformers']} under FSDP2, {ranks} x {device}, recompute {found['recompute']}:"
    )
    columns = ["tokens", "layers", "s a step", "tokens/s a GPU", "GiB allocated", "GiB reserved", "first loss"]
    lines = []
    for row in found["rows"]:
        cells = [short(row["tokens"]), "compiled" if row["compiled"] else "eager"]
        if "out_of_memory" in row:
            cells += ["out of memory", *["-"] * (4 + len(TRAINERS))]
        else:
            pace = row["tokens_per_second_a_rank"]
            cells += [f"{row['seconds']:.3f}", f"{pace:,.0f}"]
            cells += [f"{row[peak]:.1f}" if row[peak] else "-" for peak in ("peak_allocated_gib", "peak_reserved_gib")]
            cells.append(f"{row['losses'][0]:.4f}")
            for known in TRAINERS.values():
                theirs = known.get(row["tokens"]) if is_comparable else None
                cells.append("-" if theirs is None else f"{pace / theirs:.2f}")
        lines.append(cells)
    columns += [f"x {name}" for name in TRAINERS]
    return "\n".join([title, "", *markdown_table(columns, lines)])


BENCHMARKS = (
    RowBenchmark(
        name="hugging-face", about=__doc__, configure=_configure, measure=_measure, table=table, line=line_of, ranks=2
    ),
)
