"""Measures whole training steps of a model like Qwen3.5, whose layers have a recurrent state but every fourth.

    bmburst bench hybrid --gpus 2 --tokens 64K,128K --output found.json

The step is that of `benchmarks.hugging_face`: transformers and FSDP2, random weights, one sequence of random tokens
over all ranks. The model has the shape of Qwen3.5-9B, 8 of its layers, and a vocabulary of 32,768, so that the head
does not hide the layers. The methods take turns on the same weights, which stay, since the learning rate is 0:

- ours: recurrent layers and attention over the ranks by bmburst
- fla-cp: the same, but recurrences and convolutions by fla's own context parallelism
- ringmaster: axolotl-ringmaster's context parallelism, with `--inner-attention`, and the model's own loss
- unsplit: every rank trains its own sequence of tokens / ranks

`s if splitting were free` is the step of unsplit, with attention on a rank's share of the whole sequence in place of
its own sequence, by the time of one GPU's kernel. A method that cannot run here, or is out of memory, has the reason in
its row.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import sqrt
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

import bmburst
from benchmarks.attention.cells import Cell
from benchmarks.attention.method import LocalKernel, OneGpu, Setting, prepare
from benchmarks.engine.machine import RankGroup, start_ranks
from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, Row, RowBenchmark
from benchmarks.engine.timing import in_turns
from benchmarks.fla_tuning import restrict_tuning
from benchmarks.hugging_face import Training
from benchmarks.linear import fla_context
from bmburst.amounts import GIB, numbers, short, tokens
from bmburst.errors import first_line, require_known
from bmburst.integrations import transformers_recurrent
from bmburst.integrations.transformers import NAME, SplitSequences, register

METHODS = ("ours", "fla-cp", "ringmaster", "unsplit")
_Maker = Callable[[Training, Tensor, RankGroup], Callable[[], float]]
SECONDS = 120.0  # of all rounds of a length
_SMALL: Mapping[str, int] = MappingProxyType({
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "vocab_size": 256,
})  # fmt: skip


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", default="64K,128K", help="lengths of the sequence (default: 64K,128K)")
    add("--layers", type=int, default=8, help="number of layers (default: 8)")
    add("--methods", default=",".join(METHODS), help="methods, separated by commas (default: all)")
    add("--recompute", default="block-keep-attention", help="policy (default: block-keep-attention)")
    add("--compile", action="store_true", help="compile norms and activations")
    add("--inner-attention", default="sdpa", help="transformers' attention in ringmaster (default: sdpa)")
    add("--repeats", type=int, default=5, help="measured rounds (default: 5)")
    add("--small", action="store_true", help="narrow layers, also on a CPU")


def _measure(options: argparse.Namespace) -> Measured:
    methods, lengths = options.methods.split(","), numbers("--tokens", options.tokens, tokens)
    for method in methods:
        require_known("method", method, METHODS)
    group = RankGroup.world(start_ranks())
    register()
    sizes = _SMALL if options.small else {"vocab_size": 32_768}
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=options.layers, use_cache=False, **sizes)
    training = Training(config, group.device, policy=options.recompute, lr=0.0)
    if options.compile:
        training.compile()
    facts = {"parameters": training.num_weights, "layers": options.layers, "recompute": options.recompute}
    facts |= {"kinds": config.layer_types, "compiled": options.compile, "inner_attention": options.inner_attention}
    functions: list[_Maker] = [_ours, _fla, partial(_ringmaster, inner=options.inner_attention), _unsplit]
    known = dict(zip(METHODS, functions, strict=True))
    makers = {method: known[method] for method in methods}
    return facts, (row for length in lengths for row in _rows(training, makers, length, group, options.repeats))


def _rows(
    training: Training, makers: Mapping[str, _Maker], length: int, group: RankGroup, repeats: int
) -> Iterator[Row]:
    """Yield a row for each method at a length: first those that cannot run, then those that took turns."""
    config = training.model.config
    ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    steps: dict[str, _Step] = {}
    for method, maker in makers.items():
        try:
            step = _Step(maker(training, ids, group), group)
            step()  # compiles kernels
            steps[method] = step
        except torch.OutOfMemoryError as error:  # all ranks need the same memory
            yield {"tokens": length, "method": method, "failed": first_line(error)}
            training.optimizer.zero_grad()
        except (ImportError, ValueError) as error:  # the method cannot run here
            yield {"tokens": length, "method": method, "failed": first_line(error)}
    times = in_turns(*steps.values(), group=group, repeats=repeats, seconds=SECONDS)
    for (method, step), found in zip(steps.items(), times, strict=True):
        row: Row = {"tokens": length, "method": method, "seconds": statistics.median(found) / 1e3}
        row |= {"seconds_of_steps": [each / 1e3 for each in found], "loss": step.loss, "peak_gib": step.peak / GIB}
        yield row | ({"attention_seconds": _attention(config, length, group)} if method == "unsplit" else {})


class _Step:
    """A step of a method, with its last loss and its largest peak of torch's allocator over the ranks."""

    def __init__(self, step: Callable[[], float], group: RankGroup) -> None:
        self._step, self._group = step, group
        self.loss, self.peak = 0.0, 0.0

    def __call__(self) -> None:
        on_gpu = self._group.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.loss = self._step()
        self.peak = max(self.peak, self._group.largest(torch.cuda.max_memory_allocated() if on_gpu else 0))


def _ours(training: Training, ids: Tensor, group: RankGroup) -> Callable[[], float]:
    del group
    return partial(training.step, ids)


def _unsplit(training: Training, ids: Tensor, group: RankGroup) -> Callable[[], float]:
    alone = SplitSequences(bmburst.Mesh.over_process_group(sequence=1))
    return partial(training.step, ids[:, : ids.shape[1] // group.size], alone)


def _fla(training: Training, ids: Tensor, group: RankGroup) -> Callable[[], float]:
    """Return a step with fla's context parallelism in place of ours."""
    convolve = import_module("fla.modules.convolution").causal_conv1d
    scan = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    restrict_tuning()
    length, layout = ids.shape[1], training.split.options.layout
    of_scan = fla_context(length, layout, group.device)
    of_convolution = fla_context(length, layout, group.device, training.model.config.linear_conv_kernel_dim)

    def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, normalize: bool, **_: object) -> Tensor:
        out: Tensor = scan(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normalize, cp_context=of_scan)[0]
        return out

    def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str, **_: object) -> Tensor:
        out: Tensor = convolve(x, weight, bias, activation=activation, cp_context=of_convolution)[0]
        return out

    def step() -> float:
        with (
            mock.patch.object(transformers_recurrent, "burst_linear_attention", attention),
            mock.patch.object(transformers_recurrent, "burst_causal_conv", convolution),
        ):
            return training.step(ids)

    return step


def _ringmaster(training: Training, ids: Tensor, group: RankGroup, *, inner: str) -> Callable[[], float]:
    """Return a step with axolotl-ringmaster, as in its README, with an attention of transformers."""
    package, model = import_module("ringmaster"), training.model
    region = import_module("ringmaster.adapters.raw").context_parallel_region
    runtime = package.setup(
        package.RingmasterConfig(size=group.size),
        num_kv_heads=model.config.num_key_value_heads,
        device_type=group.device.type,
        inner_attn=inner,
    )
    package.wire_recurrent_layers(model).restore()  # refuses what it does not know
    whole = ids.to(group.device)

    def step() -> float:
        model.set_attn_implementation(runtime.attn_implementation)
        wiring = package.wire_recurrent_layers(model)
        try:
            with region({"input_ids": whole, "labels": whole}) as part:
                loss = model(**part, use_cache=False).loss
            loss.backward()
            training.update()
        finally:
            wiring.restore()
            model.set_attn_implementation(NAME)
        return group.all_reduce(loss.detach()).item() / group.size

    return step


def _attention(config: PreTrainedConfig, length: int, group: RankGroup) -> float:
    """Return the seconds of attention in all layers for a rank's share of a sequence, less those of unsplit."""
    is_cuda = group.device.type == "cuda"
    cell = Cell(
        suite="sequence", method="one-gpu", ranks=1, device=group.device.type, tokens=length // group.size,
        dtype="bfloat16" if is_cuda else "float32", heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
    )  # fmt: skip
    share = replace(cell, tokens=int(length / sqrt(group.size)))
    setting = Setting(group=group, kernel=LocalKernel())
    calls = (prepare(OneGpu(), each, setting).both for each in (share, cell))
    of_share, own = map(statistics.median, in_turns(*calls, group=group, repeats=5, seconds=10.0))
    layers: int = config.layer_types.count("full_attention")
    return layers * (of_share - own) / 1e3


def table(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    inner = record.get("inner_attention") if any(row["method"] == "ringmaster" for row in record["rows"]) else None
    title = (
        f"{record['parameters'] / 1e9:.2f}B parameters, {record['layers']} layers, every fourth with attention, "
        f"{record['machine']['ranks']} x {record['machine']['device']}, recompute {record['recompute']}"
        f"{', compiled' * record.get('compiled', False)}{f', ringmaster over {inner}' if inner else ''}:"
    )
    ours = {row["tokens"]: row["seconds"] for row in record["rows"] if row["method"] == "ours" and "seconds" in row}
    lines, reasons = [], []
    for row in record["rows"]:
        where, own = f"{short(row['tokens'])}, {row['method']}", ours.get(row["tokens"])
        if "failed" in row:
            reasons.append(f"{where}: {row['failed']}")
            continue
        ideal = row["seconds"] + row["attention_seconds"] if row["method"] == "unsplit" else None
        cells = [f"{row['seconds']:.3f}", "-" if own is None else f"{row['seconds'] / own:.2f}"]
        cells += ["-" if ideal is None else f"{ideal:.3f}", f"{row['peak_gib']:.1f}", f"{row['loss']:.4f}"]
        lines.append([where, *cells])
    columns = ["tokens, method", "s a step", "x ours", "s if splitting were free", "GiB allocated", "loss"]
    return "\n".join([title, "", *markdown_table(columns, lines), *(["", *reasons] if reasons else [])])


BENCHMARKS = (
    RowBenchmark(
        name="hybrid", about=__doc__, configure=_configure, measure=_measure, table=table, ranks=2,
        is_wrong=lambda row: row["method"] == "ours" and "failed" in row,
    ),
)  # fmt: skip
