"""Sizes of a hybrid of transformers from its configuration, for `bmburst plan --model DIR`. No weights are made.

Models with latent attention count as hybrids too: bmburst has no model of its own for them either.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from bmburst.errors import UserError, one_line
from bmburst.integrations.transformers import NAME, register
from bmburst.integrations.transformers_models import require_splittable
from bmburst.integrations.transformers_recurrent import mixers
from bmburst.plan.hybrid import AttentionLayer, Hybrid, RecurrentLayer

_DELTA = ("num_v_heads", "head_k_dim", "head_v_dim", "conv_dim", "conv_kernel_size")
_KDA = ("forget_gate", "num_heads", "head_dim", "conv_dim", "conv_kernel_size")
_SSD = ("num_heads", "ssm_state_size", "head_dim", "conv_dim", "conv_kernel_size")
_LIGHTNING = ("slope_rate", "num_attention_heads", "head_dim")
_LATENT = ("kv_b_proj", "kv_lora_rank", "num_heads", "qk_head_dim", "v_head_dim")
_SHARES = ("num_experts", "n_routed_experts", "num_local_experts")
_ADAPTERS = tuple(f"{name}_adapter_list" for name in ("gate_up_proj", "linear_q", "linear_k", "linear_v"))
"""Adapters of Zamba 2, of which each layer has its own beside weights that it shares. A block holds those of all layers
with its weights, in lists with places for the others."""


def read_hybrid(folder: Path) -> Hybrid:
    """Return the sizes of the model of a config.json.

    Args:
        folder: A folder with a config.json of transformers. Code in the folder is not run.

    Raises:
        UserError: The configuration cannot be read, has a layer that cannot be priced, or the model is not exact on
            split sequences.
    """
    register()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    except UserError:
        raise
    except Exception as error:  # the code of 200 model types may raise anything
        raise UserError(
            f"--model {folder}: transformers makes no causal LM of it: {type(error).__name__}: {one_line(error)}\n"
            "fix: the config.json of a causal LM with all the fields of its type"
        ) from None
    require_splittable(model, lambda: (1,), routed=True)
    return hybrid_of(model)


def hybrid_of(model: transformers.PreTrainedModel) -> Hybrid:
    """Return the sizes of a model, also on the meta device; UserError if one of its layers cannot be priced."""
    mixing = mixers(model)
    others = (module for module in model.modules() if module not in mixing)
    layers = [m for m in others if type(m).__name__.endswith("Attention") or _has(m, _LATENT)]
    if not mixing and not any(_has(layer, _LATENT) for layer in layers):
        raise _unpriced(model, "it has neither recurrent layers that bmburst knows nor latent attention")
    recurrent = Counter(_recurrent(layer) for layer in mixing)
    attention = Counter(_attention(model, layer) for layer in layers)
    blocks = _blocks(model)
    config: Any = model.config.get_text_config(decoder=True)
    counts = config.num_hidden_layers, getattr(config, "num_layers", None)  # LongCat Flash has two layers in a block
    if len(blocks) not in counts:
        raise _unpriced(model, f"its {len(blocks)} blocks are not one for each of {config.num_hidden_layers} layers")
    head = model.get_output_embeddings()
    vocabulary, hidden = head.weight.shape
    products = [_products(model, block) for block in blocks]
    return Hybrid(
        name=config.model_type,
        layers=len(blocks),
        hidden=hidden,
        vocabulary=vocabulary,
        weights=model.num_parameters(),
        active=vocabulary * hidden + sum(active for active, _ in products),
        largest=max(sum(p.numel() for p in block.parameters()) for block in blocks),
        widest=max(wide for _, wide in products),
        attention=attention,
        recurrent=recurrent,
    )


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model that are not within another one."""
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    within = {inner for block in found for inner in block.modules() if inner is not block}
    return [block for block in found if block not in within]


def _of_other_layers(block: nn.Module) -> set[nn.Module]:
    """Return the modules of a block that tokens meet in other layers."""
    lists = [found for module in block.modules() for name in _ADAPTERS if (found := getattr(module, name, None))]
    adapters = [[each for each in found if not isinstance(each, nn.Identity)] for found in lists]
    return {module for found in adapters for each in found[1:] for module in each.modules()}  # all of one size


def _products(model: nn.Module, block: nn.Module) -> tuple[float, float]:
    """Return the weights of a block's matrix products that a token meets, and the numbers that these products give.

    Of experts, a token meets those that its router chooses. Those without weights are chosen as often as the others.
    """
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    active, wide, others = 0.0, 0.0, _of_other_layers(block)
    for module in block.modules():
        if isinstance(module, nn.Conv1d) or module in others:
            continue
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear) and weight.dim() == 2:
                active, wide = active + weight.numel(), wide + weight.shape[0]
            elif weight.dim() == 3:
                every = next((n for n in (getattr(config, key, None) for key in _SHARES) if n), None)
                chosen = getattr(config, "num_experts_per_tok", None)
                empty = getattr(config, "zero_expert_num", None) or 0
                if not chosen or every is None or len(weight) not in (every, every + empty):
                    raise _unpriced(model, f"the products of {type(module).__name__}.{name} are not known")
                chosen *= every / (every + empty)
                active, wide = active + weight[0].numel() * chosen, wide + chosen * weight.shape[1]
    return active, wide


def _recurrent(layer: nn.Module) -> RecurrentLayer:
    """Return the sizes of a recurrent layer."""
    found: Any = layer
    if _has(layer, _DELTA):
        state = found.num_v_heads, found.head_k_dim, found.head_v_dim
        return RecurrentLayer(state, "gated_delta", found.conv_dim, found.conv_kernel_size, gates=2)
    if _has(layer, _KDA):
        state = found.num_heads, found.head_dim, found.head_dim
        return RecurrentLayer(state, "kda", found.conv_dim, found.conv_kernel_size, gates=found.head_dim + 1)
    if _has(layer, _LIGHTNING):
        state = found.num_attention_heads, found.head_dim, found.head_dim
        return RecurrentLayer(state, "decay", 0, 1, gates=1)
    if _has(layer, _SSD):
        state = found.num_heads, found.ssm_state_size, found.head_dim
        return RecurrentLayer(state, "decay", found.conv_dim, found.conv_kernel_size, gates=1)
    if _has(layer, ("conv",)) and isinstance(found.conv, nn.Conv1d):
        (width,) = found.conv.kernel_size
        return RecurrentLayer((), "", found.conv.in_channels, width, gates=0)
    raise _unpriced(layer, "its recurrence is none of those that plan knows")


def _attention(model: nn.Module, layer: nn.Module) -> AttentionLayer:
    """Return the sizes of an attention layer."""
    found: Any = layer
    if _has(layer, _LATENT):
        return AttentionLayer(found.num_heads, found.num_heads, found.qk_head_dim, found.v_head_dim)
    if not _has(layer, ("k_proj", "v_proj", "head_dim", "num_key_value_groups")):
        raise _unpriced(model, f"{type(layer).__name__} has no plain projections of keys and values")
    if getattr(layer, "sliding_window", None):
        raise _unpriced(model, f"{type(layer).__name__} has a window")
    kv_heads = found.k_proj.out_features // found.head_dim
    return AttentionLayer(kv_heads * found.num_key_value_groups, kv_heads, found.head_dim, found.head_dim)


def _has(layer: nn.Module, names: tuple[str, ...]) -> bool:
    return all(hasattr(layer, name) for name in names)


def _unpriced(module: nn.Module, why: str) -> UserError:
    return UserError(
        f"cannot price {type(module).__name__}: {why}\n"
        "allowed: attention, latent attention, gated and Kimi delta rule, Mamba 2, Lightning, short convolutions\n"
        "fix: time some steps of the model itself; plan has no estimate of it"
    )
