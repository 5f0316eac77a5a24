"""Tests which causal LMs of transformers are exact on a split sequence: `python -m benchmarks.families`.

Every model type of the installed transformers is created with its default configuration, except for tiny sizes, random
weights and no dropout. One batch is computed whole, with transformers' attention, and split over the ranks. Logits,
loss and all gradients must agree to 1e-5, relative, in fp64 (some models still compute norms in fp32). A gradient whose
norm is below a hundredth of the largest is compared relative to that hundredth: the gradient of a key bias, for
example, is zero up to rounding. Windows are smaller than the sequence, and softcaps have the magnitude of scores.

A type is "exact" if the results agree, "refused" if bmburst refuses the model, and "not made" if transformers cannot
create or run the tiny model. "different" (the results do not agree) and "failed" (any other error) are bugs.
"""

import argparse
import contextlib
import gc
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.machine import publish
from bmburst.errors import UserError, first_line

TOKENS, VOCABULARY, WINDOW, SOFTCAP, TOLERANCE = 37, 61, 7, 1.0, 1e-5
LARGEST = 3_000_000  # largest number of parameters of a tested model
KINDS = ("exact", "different", "failed", "refused", "not made")
BUGS = frozenset({"different", "failed"})
# Sizes under the names that families use. A configuration gets those that it has.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mlp_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim"), 8),
    "qk_rope_head_dim": 4,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "rotary_dim": 4,
    "eos_token_id": 1,
    # Recurrent layers: value heads share keys where a family can.
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups", "num_mem_blocks"), 1),
    **dict.fromkeys(("mamba_expand", "expand", "linear_num_key_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "adapter_rank"), 4),
    "mamba_d_ssm": 64,
    "block_size": 8,
    "lru_width": 32,
}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_CONV = {"layer_types": ["conv", "full_attention"]}
# What the names above do not say, by type: one layer of each kind, and sizes that depend on others.
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "minimax"), _LINEAR),
    **{name: _CONV | {"block_multiple_of": 8} for name in ("lfm2", "lfm3")},
    "bailing_hybrid": _LINEAR | {"head_dim": 4},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": _LINEAR | {"shared_intermediate_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": _LINEAR | {"qk_head_dim": 12},
    "lfm2_moe": _CONV | {"num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW},
    "olmo_hybrid": _LINEAR | {"linear_num_key_heads": 4, "linear_value_head_dim": 16},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "num_key_value_heads": 4},
    **{name: {"head_dim": 4} for name in ("deepseek_v3", "axk1", "youtu")},
    "deepseek_v2": {"head_dim": 4, "num_experts_per_tok": 2},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "longcat_flash": {"head_dim": 4, "num_layers": 1, "expert_ffn_hidden_size": 16, "zero_expert_num": 1},
}
SLOW = 0.05  # the decay A of recurrent layers: with faster ones a lost state would not show


def main() -> int:
    """Run the command line and return the exit status: 1 if a result is in `BUGS`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks that share the sequence (default: 2)")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="model types (default: all)")
    parser.add_argument("--output", type=Path, help="JSON file of the results; its table is written as .md")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return _rank(options.rank, options.types)
    from bmburst.launch.launcher import LaunchSpec, launch

    with tempfile.TemporaryDirectory(prefix="bmburst-families-") as folder:
        words = ["--rank", folder, *(["--types", *options.types] if options.types else [])]
        status = launch(LaunchSpec(nproc=options.ranks), ["-m", "benchmarks.families", *words])
        file = Path(folder) / "families.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    publish(options.output, "benchmarks.families", table(rows, options.ranks), options.ranks, rows=rows)
    return status or int(any(row["result"] in BUGS for row in rows))


def table(rows: Sequence[dict[str, Any]], ranks: int) -> str:
    """Return the results as Markdown: the exact types in a line, the others with their reasons."""
    version = rows[0]["transformers"] if rows else ""
    by_kind = {kind: [row for row in rows if row["result"] == kind] for kind in KINDS}
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in by_kind.items() if found or kind != "failed")
    lines = [f"transformers {version}, {ranks} ranks, {len(rows)} model types: {counts}.", "", "Exact:"]
    lines += [", ".join(row["type"] for row in by_kind["exact"]) + ".", ""]
    lines += ["| type | result | reason |", "|---|---|---|"]
    others = (row for kind in KINDS[1:] for row in by_kind[kind])
    return "\n".join([*lines, *(f"| {row['type']} | {row['result']} | {row['reason']} |" for row in others)])


def _rank(folder: Path, types: Sequence[str] | None) -> int:
    """Test every type on this rank; rank 0 writes a line for each."""
    import torch
    import torch.distributed as dist
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from bmburst.integrations.transformers import SplitSequences, register
    from bmburst.mesh import Mesh

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    register()
    split = SplitSequences(Mesh.over_process_group())
    for name in types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        result, reason = _tried(name, split)
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, (result, reason))
        if dist.get_rank() == 0:
            result, reason = max(reasons, key=lambda each: (each[0] in BUGS, KINDS.index(each[0])))
            row = {"type": name, "result": result, "reason": reason, "transformers": transformers.__version__}
            with (folder / "families.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            sys.stderr.write(f"{name}: {result}, {reason}\n")
        gc.collect()
    dist.destroy_process_group()
    return 0


def _tried(name: str, split: Any) -> tuple[str, str]:
    """Return the result of a type, one of `KINDS`, and the reason or the largest distance."""
    import torch

    ids = torch.randint(2, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    try:
        whole = tiny_model(name, "eager")
        logits = whole(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if not bool(logits.isfinite().all()):
            raise ValueError("its tiny model gives numbers that are not finite")
    except Exception as error:  # the code of 200 model types may raise anything
        return "not made", _cell_text(error)
    try:
        with contextlib.redirect_stdout(None):
            model = tiny_model(name, "bmburst")
            part = split.part(ids)
            with torch.no_grad():
                our_logits = part.logits(model)
            ours = part.loss(model)
            ours.backward()
    except UserError as error:
        return "refused", _cell_text(error)
    except Exception as error:  # not a refusal: a bug of bmburst
        return "failed", f"{type(error).__name__}: {_cell_text(error)}"
    return _compared(whole, logits, loss, model, part.whole(our_logits), split.mean(ours.detach()))


def _compared(whole: Any, logits: Any, loss: Any, model: Any, our_logits: Any, our_loss: float) -> tuple[str, str]:
    """Compare logits, loss and gradients on split sequences with those on whole ones; return as `_tried`.

    Gradients are averaged over the ranks.
    """
    import torch
    import torch.distributed as dist

    distances = {"logits": _distance(our_logits, logits), "loss": abs(our_loss / loss.item() - 1)}
    theirs = dict(whole.named_parameters())
    # The gradient of a key bias is zero up to rounding, since softmax is invariant to it.
    least = 1e-2 * max(float(p.grad.norm()) for p in theirs.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        wanted = theirs[name].grad
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        dist.all_reduce(gradient)
        if wanted is not None:
            difference = gradient / dist.get_world_size() - wanted
            distances[name] = float(difference.norm()) / max(float(wanted.norm()), least)
    worst = max(distances, key=lambda name: distances[name])
    if distances[worst] < TOLERANCE:
        return "exact", f"{distances[worst]:.1e}"
    return "different", f"{worst}: {distances[worst]:.1e}"


def _distance(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


def tiny_model(name: str, attention: str) -> Any:
    """Return a tiny model of a type in fp64 with seeded random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    default = AutoConfig.for_model(name)
    own: dict[str, Any] = {key: value for key, value in SIZES.items() if getattr(default, key, None) is not None}
    own = {key: value for key, value in own.items() if not isinstance(getattr(type(default), key, None), property)}
    own |= {"sliding_window": WINDOW} if getattr(default, "sliding_window", None) else {}
    own |= {"attn_logit_softcapping": SOFTCAP} if getattr(default, "attn_logit_softcapping", None) else {}
    own |= {key: 0.0 for key, value in default.to_dict().items() if _is_dropout(key, value)}
    if (getattr(default, "rope_parameters", None) or {"rope_theta": 0}).get("rope_theta", 0) is None:
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}  # the type has no default theta
    values = getattr(default, "layer_types", None)
    stored = getattr(type(default), "attribute_map", {}).get("layer_types", "layer_types")
    if values is not None and not isinstance(getattr(type(default), stored, None), property):
        own["layer_types"] = [*values[:1], *values[-1:]]  # both kinds of layers, if there are two
    if getattr(default, "kv_lora_rank", None):
        own["num_key_value_heads"] = own["num_attention_heads"]  # latent attention expands keys to all heads
    own |= OWN.get(name, {})
    config = AutoConfig.for_model(name, **own)
    # The fused products of experts do not support fp64.
    kinds = {"attn_implementation": attention, "experts_implementation": "eager"}
    with torch.device("meta"):  # a type whose sizes have other names may not fit in memory
        size = AutoModelForCausalLM.from_config(config, **kinds).num_parameters()
    if size > LARGEST:
        raise ValueError(f"its sizes have other names: {size:,} parameters")
    model = AutoModelForCausalLM.from_config(config, **kinds).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = "norm" in key or "ln_" in key
            parameter.normal_(float(is_norm and not key.endswith("bias")), 0.2, generator=generator)
            if key.endswith("A_log"):
                parameter.fill_(math.log(SLOW))
    return model


def _is_dropout(key: str, value: object) -> bool:
    return ("dropout" in key or "pdrop" in key or "layerdrop" in key) and isinstance(value, float) and value > 0


def _cell_text(error: BaseException) -> str:
    return first_line(error).replace("|", "/")[:160]


if __name__ == "__main__":
    sys.exit(main())
