"""Compares LoRA of llama-3-8b on one GPU with PEFT and with `bmburst train`.

Adapters have rank 16 on q_proj and v_proj. The input is one sequence of 64K random tokens; weights are random, in
bfloat16; the optimizer is AdamW. Each method runs in a separate process. Out of memory is a result, with the requested
bytes. Times are medians of whole steps, including the host. Peaks are those of torch's allocator. The methods:

- peft: transformers' model and loss, SDPA with torch's default backend, transformers' gradient checkpointing
- peft-liger: peft with the kernels and the fused loss of Liger-Kernel, without which logits may not fit
- peft-liger-cudnn: peft-liger with the cuDNN backend of SDPA
- peft-bmburst: PEFT's model with attn_implementation="bmburst" on one rank, bmburst's `recompute` and loss
- bmburst: `bmburst train --lora.rank 16 --recompute auto`, with its own random weights and tokens

PEFT's adapters are in bfloat16 (autocast_adapter_dtype=False). Its default is fp32, whose products are slower.
"""

import argparse
import contextlib
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engine.report import markdown_table
from benchmarks.engine.rows import Measured, Row, RowBenchmark
from benchmarks.hugging_face import fill, random_model, shape_of, timed
from benchmarks.train_jobs import run_train
from bmburst.amounts import GIB, short, tokens
from bmburst.blocks.presets import PRESETS
from bmburst.errors import first_line, require_known

METHODS = ("peft", "peft-liger", "peft-liger-cudnn", "peft-bmburst", "bmburst")
RANK, TARGETS = 16, ("q_proj", "v_proj")


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="llama-3-8b", choices=PRESETS, help="preset of the shape (default: llama-3-8b)")
    add("--layers", type=int, help="number of layers (default: that of the preset)")
    add("--tokens", type=tokens, default=65536, help="tokens of the sequence (default: 64K)")
    add("--methods", default=",".join(METHODS), help="methods, separated by commas (default: all)")
    add("--steps", type=int, default=4, help="measured steps (default: 4)")
    add("--warmup", type=int, default=2, help="warm-up steps (default: 2)")


def _measure(options: argparse.Namespace) -> Measured:
    methods = options.methods.split(",")
    for method in methods:
        require_known("method", method, METHODS)
    facts = {name: getattr(options, name) for name in ("model", "layers", "tokens")}
    return facts, (_in_a_process(method, options) for method in methods)


def _in_a_process(method: str, options: argparse.Namespace) -> Row:
    """Measure a method in a new process, so that all memory is free and patches of Liger-Kernel do not persist."""
    kept = {name: getattr(options, name) for name in ("model", "layers", "tokens", "steps", "warmup")}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        try:
            return process.submit(_row, method, argparse.Namespace(**kept)).result()
        except Exception as error:  # of the method, or of its process
            return {"method": method, "failed": f"{type(error).__name__}: {first_line(error)}"}


def _row(method: str, options: argparse.Namespace) -> Row:
    if "liger" in method and (find_spec("liger_kernel") is None or not torch.cuda.is_available()):
        return {"method": method, "failed": "needs liger-kernel and a GPU"}
    if method == "bmburst":
        return {"method": method} | _of_train(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return {"method": method} | _of_peft(method, options, device)
    except torch.OutOfMemoryError as error:
        return {"method": method, "out_of_memory": first_line(error)}


def _of_peft(method: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure a method with PEFT in this process, and return its row."""
    import peft
    import transformers

    ours = method == "peft-bmburst"
    if ours:
        from bmburst.integrations.transformers import register

        register()
    base = random_model(shape_of(options.model, options.layers), "bmburst" if ours else "sdpa")
    base.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    fill(base, device)
    if "liger" in method:
        import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(model=base)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False).train()
    loss_of = _loss_of(model, ours=ours)
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4, betas=(0.9, 0.95), fused=True)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(base.config.vocab_size, (1, options.tokens), generator=draw).to(device)

    def step() -> float:
        loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    with _sdpa(method):
        found = _measured(step, options.warmup, options.steps, device)
    found["trained"] = sum(weight.numel() for weight in adapters)
    return found | {"peft": peft.__version__, "transformers": transformers.__version__}


def _loss_of(model: Any, *, ours: bool) -> Callable[[Tensor], Tensor]:
    """Enable activation checkpointing in a model, and return the function from token ids to the loss."""
    if not ours:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()

        def theirs(ids: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            return loss

        return theirs
    import bmburst
    from bmburst.integrations.transformers import SplitSequences, recompute

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    recompute(model)
    split = SplitSequences(bmburst.Mesh.over_process_group())
    return lambda ids: split.part(ids).loss(model)


def _sdpa(method: str) -> contextlib.AbstractContextManager[Any]:
    if not method.endswith("cudnn"):
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION])


def _measured(step: Callable[[], float], warmup: int, steps: int, device: torch.device) -> dict[str, Any]:
    seconds, losses = timed(step, warmup, steps)
    found: dict[str, Any] = {"seconds": statistics.median(seconds[warmup:]), "seconds_of_steps": seconds}
    found["losses"] = losses
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return found


def _of_train(options: argparse.Namespace) -> dict[str, Any]:
    """Run `bmburst train` and return its steps."""
    words = ["--preset", options.model, "--sequence-length", str(options.tokens)]
    words += ["--model.num_layers", str(options.layers)] if options.layers else []
    words += ["--dtype", "bfloat16" if torch.cuda.is_available() else "float32", "--lora.rank", str(RANK)]
    words += ["--lora.alpha", str(2 * RANK), "--lora.targets", ",".join(TARGETS)]
    words += ["--model.max_position_embeddings", str(options.tokens), "--recompute", "auto"]
    words += ["--steps", str(options.warmup + options.steps), "--eval-every", "0", "--eval-sequences", "1"]
    words += ["--sample-tokens", "0", "--checkpoint-every", "never"]
    try:
        done = run_train(1, words, {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"})
    except RuntimeError as error:
        return {"failed": " ".join(str(error).split()[-60:])}
    seconds = [options.tokens / line["tokens_per_second"] for line in done.metrics]
    found = {"seconds": statistics.median(seconds[options.warmup :]), "seconds_of_steps": seconds}
    found["losses"] = [line["loss"] for line in done.metrics]
    if memory := max(line.get("memory_gib") or 0.0 for line in done.metrics):
        found["peak_gib"] = memory
    return found | {"command": done.command}


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row in one line, printed when a method is done."""
    if reason := _reason(row):
        return f"{row['method']}: {reason}"
    times = ", ".join(f"{each:.3f}" for each in row["seconds_of_steps"])
    return f"{row['method']}: {row['seconds']:.3f} s a step ({times}), {row.get('peak_gib', 0):.1f} GiB"


def _reason(row: Mapping[str, Any]) -> str | None:
    """Return why a row has no time, or None."""
    return f"out of memory: {row['out_of_memory']}" if "out_of_memory" in row else row.get("failed")


def table(found: Mapping[str, Any]) -> str:
    """Return the rows of a record as Markdown."""
    layers = "" if found["layers"] is None else f", {found['layers']} layers"
    title = (
        f"LoRA of {found['model']}{layers}, rank {RANK} on {' and '.join(TARGETS)}, one sequence of "
        f"{short(found['tokens'])} tokens on one device:"
    )
    columns = ["method", "s a step", "tokens/s", "GiB allocated", "GiB reserved", "first loss"]
    lines, reasons = [], []
    for row in found["rows"]:
        if reason := _reason(row):
            reasons.append(f"{row['method']}: {reason}")
            cells = ["-"] * 5
        else:
            cells = [f"{row['seconds']:.3f}", f"{found['tokens'] / row['seconds']:,.0f}"]
            cells += [f"{row[peak]:.1f}" if peak in row else "-" for peak in ("peak_gib", "reserved_gib")]
            cells.append(f"{row['losses'][0]:.4f}")
        lines.append([row["method"], *cells])
    return "\n".join([title, "", *markdown_table(columns, lines), *(["", *reasons] if reasons else [])])


BENCHMARKS = (
    RowBenchmark(name="lora-peers", about=__doc__, configure=_configure, measure=_measure, table=table, line=line_of),
)
