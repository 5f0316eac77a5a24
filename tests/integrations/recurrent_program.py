"""Tiny hybrids of transformers, batches for them, and what every rank does with them. Rank 0 leaves what it saw."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trl import SFTConfig

from benchmarks.tiny_families import tiny_model
from bmburst import Documents, Mesh
from bmburst.integrations.transformers import Part, SplitSequences, recompute, register
from bmburst.integrations.transformers_cache import SplitCache, generate
from tests.integrations import transformers_trainer_program as trainers

FEW = ("qwen3_next", "kimi_linear", "nemotron_h", "jamba", "lfm2", "minimax", "recurrent_gemma")
"""A type of each kind of layer: gated delta rule, KDA, Mamba 2, Mamba 1, convolution, Lightning, RG-LRU."""
OTHERS = ("llama4_text", "gemma4_text", "falcon", "stablelm")
"""Types whose attention is chunked, shared between layers, a class of its own, or not declared."""
REST = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "lfm2_moe", "lfm3", "mamba"),
    *("mamba2", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "zamba", "zamba2"),
)
CASES = (
    *product((*FEW, *OTHERS[::2]), ("documents",)),
    *product((*FEW[::2], *OTHERS[1::2]), ("padding",)),
    *product(FEW[1:6:2], ("balanced",)),
)
"""Types and batches: each type, and each kind of state from document to document."""
BALANCED = tuple(product(FEW[:-1], ("balanced",)))  # the windows of recurrent_gemma need another layout
TOKENS, VOCABULARY = 23, 61  # odd, and padded on 2 and 3 ranks
# The first and last token, exclusive, of each document of two samples. One of a token, one over three ranks.
SPANS = {
    "documents": (((0, 4), (4, 5), (5, 21), (21, 23)), ((0, 23),)),
    "padding": (((6, 23),), ((0, 19),)),  # before one sample, behind the other
}
EVERY_SPAN = SPANS | {"balanced": (((0, 4), (4, 5), (5, 21)),) * 2}  # this layout needs equal documents in all samples
LAYOUTS = {"documents": "zigzag", "padding": "contiguous", "balanced": "balanced"}
ANSWERED = ("nemotron_h", "bamba", "kimi_linear", "mamba", "minimax", "recurrent_gemma", "deepseek_v3", "llama4_text")
"""Types that generate in every run: with states of transformers' or of their own, also without keys and values, with a
cache of latents, with chunks, or with positions that they would count from 0 in each call."""
ALSO_ANSWERED = (
    *("qwen3_next", "qwen3_5_text", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "olmo_hybrid", "zamba", "zamba2"),
    *("deepseek_v2", "minicpm3", "glm4_moe_lite", "axk1", "youtu", "longcat_flash", "bailing_hybrid"),
    *("falcon", "stablelm", "gemma3n_text", "afmoe", "mamba2", "falcon_mamba", "llama4"),
    *("gpt_oss", "flint", "granite_swa", "granitemoe_swa", "mimo_v2_flash"),
)
PROMPTS = (1, 3, 8, 23)
GREEDY = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
WITH_LOGITS = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
WRAPS = {"fsdp2": "qwen3_next", "ddp": "nemotron_h", "lora": "qwen3_next", "lora_weight": "recurrent_gemma"}
ADAPTED: dict[str, dict[str, Any]] = {
    "qwen3_next": {"target_modules": ["in_proj_qkvz", "in_proj_ba"]},
    "recurrent_gemma": {"target_modules": ["o_proj"], "target_parameters": ["rg_lru.recurrent_gate_weight"]},
}
"""What LoRA adapts: matrices of a recurrent layer, or a weight of a module that is not linear, which PEFT wraps."""
Found = dict[str, Any]


def ids() -> Tensor:
    """Return the token ids of two samples."""
    return torch.randint(2, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def with_lora(model: Any) -> nn.Module:
    """Return a model with adapters in its recurrent layers, none of them zero."""
    torch.manual_seed(0)
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=2, **ADAPTED[model.config.model_type]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    return adapted.double()


def alone(name: str, case: str, *, lora: bool = False) -> Found:
    """Return what one process gives for each document alone: transformers' own attention and recurrences."""
    model = tiny_model(name, "eager")
    model = with_lora(model) if lora else model
    logits = torch.zeros(2, TOKENS, VOCABULARY, dtype=torch.float64)
    losses = []
    for sample, spans in enumerate(EVERY_SPAN[case]):
        for begin, end in spans:
            text = ids()[sample : sample + 1, begin:end]
            found = model(input_ids=text, use_cache=False).logits[0]
            logits[sample, begin:end] = found.detach()
            losses.append(nn.functional.cross_entropy(found[:-1], text[0, 1:], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    return {"logits": logits, "loss": loss.item(), "gradients": _gradients(model)}


def run(output: Path, cases: Sequence[tuple[str, str]], size: int, wraps: bool) -> None:
    """Types and batches on sequences over all ranks, and wrapped models."""
    register()
    mesh, found = Mesh.over_process_group(sequence=size), {}
    for name, case in cases:
        model = tiny_model(name, "bmburst")
        part = part_of(SplitSequences(mesh, layout=LAYOUTS[case]), case)
        with torch.no_grad():
            logits = part.whole(part.logits(model))
        found[f"{name} {case}"] = {"logits": logits} | step(model, part)
    for kind, name in WRAPS.items() if wraps else ():
        found[kind] = step(
            wrapped(kind, tiny_model(name, "bmburst").train()), part_of(SplitSequences(mesh), "documents")
        )
    if dist.get_rank() == 0:
        torch.save(found, output)


def prompt(length: int) -> Tensor:
    """Return the token ids of two prompts."""
    return torch.randint(2, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))


def turns(generated: Callable[..., Any], length: int, device: str = "cpu") -> Found:
    """Return the text of a prompt, its answer, a second turn and its answer, and the logits of all answered tokens."""
    text, logits = prompt(length)[:, :0].to(device), []
    for turn in (prompt(length), prompt(17)):
        text = torch.cat((text, turn.to(device)), 1)
        # Without a mask, transformers would mask ids of padding.
        found = generated(text, attention_mask=torch.ones_like(text), **WITH_LOGITS)
        text = found.sequences
        logits += found.logits
    return {"text": text, "logits": torch.stack(logits)}


def answers(output: Path, types: tuple[str, ...], lengths: tuple[int, ...]) -> None:
    """Greedy answers to prompts and to a second turn of each, after prefills in two layouts."""
    register()
    mesh, found = Mesh.over_process_group(), {}
    for name in types:
        model = tiny_model(name, "bmburst")
        for length in lengths:
            cache = SplitCache(model.config, mesh)
            cache.layout = "contiguous" if length == 8 else "zigzag"
            found[name, length] = turns(partial(generate, model, mesh=mesh, past_key_values=cache), length)
    torch.save(found, output / f"{dist.get_rank()}.pt")


def part_of(split: SplitSequences, case: str) -> Part:
    if case != "padding":
        lengths = [[end - begin for begin, end in spans] for spans in EVERY_SPAN[case]]
        return split.part(ids(), documents=[Documents(tuple(each)) for each in lengths])
    mask = torch.zeros(2, TOKENS, dtype=torch.int64)
    for row, ((begin, end),) in zip(mask, SPANS[case], strict=True):
        row[begin:end] = 1
    return split.part(ids(), attention_mask=mask)


def wrapped(kind: str, model: Any) -> nn.Module:
    if kind.startswith("lora"):
        return with_lora(model)
    if kind == "ddp":
        model.gradient_checkpointing_enable()
        wrapped: nn.Module = DistributedDataParallel(model)
        return wrapped
    recompute(model, "block-keep-attention")
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def step(model: nn.Module, part: Part) -> Found:
    """Return the mean loss, and the gradients as data parallelism would average them."""
    loss = part.loss(model)
    loss.backward()
    gradients = _gradients(model)
    averaged = isinstance(model, DistributedDataParallel) or type(model).__name__.startswith("FSDP")
    for gradient in () if averaged else gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return {"loss": part.mesh.sum(loss.item()) / dist.get_world_size(), "gradients": gradients}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name.removeprefix("module.")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return found


def steps(output: Path, name: str) -> None:
    """Train a type for 30 steps on one batch in fp64, over all ranks: rounding of fp32 grows from step to step."""
    register()
    mesh = Mesh.over_process_group()
    model = tiny_model(name, "bmburst").train()
    part = part_of(SplitSequences(mesh), "documents")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = part.loss(model)
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(part.mesh.sum(loss.item()) / dist.get_world_size())
    if dist.get_rank() == 0:
        torch.save(losses, output)


def fine_tune(output: Path, name: str) -> None:
    """Train a type with TRL's SFTTrainer on packed texts, over all ranks."""
    split = trainers.start()
    texts = ["BCDEFGHIJKLMNOP"[i % 7 : i % 7 + 3 + i % 9] for i in range(24)]
    model = tiny_model(name, "bmburst").float().train()
    options = trainers.COMMON | {"gradient_accumulation_steps": 1, "max_steps": 4, "learning_rate": 1e-3}
    arguments = SFTConfig(
        output_dir=str(output.parent / f"{name}-{dist.get_world_size()}"),
        max_length=24,
        packing=True,
        per_device_train_batch_size=1,
        bf16=False,  # TRL's default is True, whose rounding AdamW makes larger
        **options,
    )
    trainer = trainers.SplitTuner(
        split=split,
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        processing_class=trainers.tokenizer(),
    )
    trainer.train()
    if dist.get_rank() == 0:
        torch.save([line["loss"] for line in trainer.state.log_history if "loss" in line], output)
