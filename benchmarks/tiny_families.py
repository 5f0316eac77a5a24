"""Tiny models of every causal LM of transformers: the default configuration with small sizes and random weights.

Windows and chunks are smaller than the sequence, softcaps have the magnitude of scores, and positions from which a type
scales its queries are within the sequence, so that each of them shows. There is a layer of each kind.
"""

import math
from typing import Any

TOKENS, VOCABULARY, WINDOW, SOFTCAP = 37, 61, 7, 1.0
LARGEST = 3_000_000
"""Largest number of parameters of a tested model."""
SLOW = 0.05
"""The decay A of recurrent layers: with faster ones a lost state would not show."""

SIZES: dict[str, Any] = {
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
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "hc_lowrank", "router_hidden_size"), 8),
    "is_decoder": True,  # a type that is an encoder by default
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
"""Sizes under the names that families use. A configuration gets those that it has."""

_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_CONV = {"layer_types": ["conv", "full_attention"]}
_BLOCKS = {"layer_types": ["linear_attention", "hybrid"] * 2}  # a block that layers share
_KINDS = ("layer_types", "mlp_layer_types")
_WIDE = {"global_head_dim": 16}  # full attention has wider heads than windows
_SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_CHUNKED = {
    **{"intermediate_size_mlp": 48, "attention_chunk_size": WINDOW, "floor_scale": 5, "no_rope_layers": [1, 0, 1]},
    **{"layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
    **{"moe_layers": [0], "num_experts_per_tok": 1},
}
_INDEXED = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
    **{"indexer_compress_ratio": 2, "layer_types": ["linear_attention", "indexed_attention"]},
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "minimax"), _LINEAR),
    "lfm2": _CONV | {"block_multiple_of": 8},
    "lfm3": {"block_multiple_of": 8},
    "bailing_hybrid": _LINEAR | {"head_dim": 4},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": _LINEAR | {"shared_intermediate_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": _LINEAR | {"qk_head_dim": 12},
    "lfm2_moe": _CONV | {"num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "moe_shared_expert_intermediate_size": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW},
    "olmo_hybrid": _LINEAR | {"linear_num_key_heads": 4, "linear_value_head_dim": 16},
    "zamba": _BLOCKS,
    "zamba2": _BLOCKS | {"n_mamba_heads": 4, "num_key_value_heads": 4},
    **{name: {"head_dim": 4} for name in ("deepseek_v3", "axk1", "youtu")},
    "deepseek_v2": {"head_dim": 4, "num_experts_per_tok": 2},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "longcat_flash": {"head_dim": 4, "num_layers": 1, "expert_ffn_hidden_size": 16, "zero_expert_num": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": _ROPE,
    },
    "roc_bert": {
        **{"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
        **{"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "reformer": {
        **{"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "attention_head_size": 8},
        **{"feed_forward_size": 32, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
    },
    "zaya": {"num_experts_per_tok": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": _SHARED | _WIDE,
    "gemma4_unified_text": _WIDE,
    "gemma3n_text": _SHARED | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "qwen4_exp_text": _INDEXED,
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE | {"mrope_section": [2, 1, 1]}),
    },
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY, "local_attention_window_len": WINDOW},
    **{name: {"hidden_size_global": 32} for name in ("blt_local_encoder", "blt_local_decoder")},
    "dots3_note_text": {
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16},
        **{"swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "index_head_dim": 8, "index_n_heads": 2},
    },
    "dots3_note_vision_encoder": {"pyramid_num_routed": [-1, -1], "adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8},
    "phi4_multimodal_vision": {"image_size": 28, "crop_size": 28},
    "phi4_multimodal_audio": {
        **{"num_blocks": 1, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32},
        **{"nemo_conv_channels": 8, "bias_max_distance": 8},
    },
    "llama4_text": _CHUNKED,
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_loop_text": {
        **{"unpadded_vocab_size": VOCABULARY, "layer_types": ["hybrid_sliding", "hybrid", "hybrid"]},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
        **{"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2},
    },
    "dory": {
        **{"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_hidden_layers": 3},
        **{"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
        "initializer_range": 0.2,  # by which it divides its scales: a smaller one saturates softmax
    },
}
"""What the names above do not say, by type: one layer of each kind, and sizes that depend on others."""


def tiny_config(name: str) -> Any:
    """Return the tiny configuration of a model type."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **_values(name))
    if name == "gemma3n":
        config.vision_config = _blind(config.vision_config)
    default, tiny = (each.get_text_config(decoder=True) for each in (AutoConfig.for_model(name), config))
    for key in _KINDS:
        if lost := set(getattr(default, key, None) or ()) - set(getattr(tiny, key, None) or ()):
            raise ValueError(f"its tiny model has no layer of {key} {min(lost)!r}")
    return config


def _blind(config: Any) -> Any:
    """Return a vision configuration whose model is empty: Gemma 3n's is of the package timm, and text needs none."""
    from transformers import AutoConfig, AutoModel, PreTrainedModel

    kind = type("Blind", (type(config),), {"model_type": "blind", "__module__": __name__})
    model = type("BlindModel", (PreTrainedModel,), {"config_class": kind, "main_input_name": "pixel_values"})
    AutoConfig.register("blind", kind, exist_ok=True)
    AutoModel.register(kind, model, exist_ok=True)
    return kind(**{key: getattr(config, key) for key in ("hidden_size", "vocab_size", "vocab_offset", "rms_norm_eps")})


def tiny_model(name: str, attention: str) -> Any:
    """Return a tiny model of a type in fp64 with seeded random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(name)
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
            if key.endswith("recurrent_param"):  # of RG-LRU, which decays by exp(-8 softplus(parameter)) at most
                parameter.fill_(math.log(math.expm1(SLOW / 8)))
    return model


def _values(name: str, default: Any = None) -> dict[str, Any]:
    """Return the small values of a type, also of the configurations inside of its own."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(name) if default is None else default
    default.allow_global_per_layer_attribute_access = True
    own: dict[str, Any] = {key: value for key, value in SIZES.items() if getattr(default, key, None) is not None}
    own = {key: value for key, value in own.items() if not isinstance(getattr(type(default), key, None), property)}
    own |= {"sliding_window": WINDOW} if getattr(default, "sliding_window", None) else {}
    own |= {"attn_logit_softcapping": SOFTCAP} if getattr(default, "attn_logit_softcapping", None) else {}
    own |= {key: 0.0 for key, value in default.to_dict().items() if _is_dropout(key, value)}
    if (getattr(default, "rope_parameters", None) or {"rope_theta": 0}).get("rope_theta", 0) is None:
        own["rope_parameters"] = _ROPE  # the type has no default theta
    for key in _KINDS:
        values = getattr(default, key, None)
        stored = getattr(type(default), "attribute_map", {}).get(key, key)
        if values is not None and not isinstance(getattr(type(default), stored, None), property):
            own[key] = list(dict.fromkeys(values))  # one layer of each kind
    if getattr(default, "kv_lora_rank", None):
        own["num_key_value_heads"] = own["num_attention_heads"]  # latent attention expands keys to all heads
    for key in type(default).sub_configs:
        if (inside := getattr(default, key, None)) is not None:
            kind = inside.model_type
            own[key] = ({"model_type": kind} if kind else {}) | _values(kind, inside)
    own |= OWN.get(name, {})
    layers = max(own.get("num_hidden_layers", 2), *(len(own.get(key, ())) for key in _KINDS))
    for key in _KINDS:
        if own.get(key):  # the last kind again, if there are more of the other kinds
            own[key] = [*own[key], *own[key][-1:] * (layers - len(own[key]))]
    if any(key in own for key in _KINDS):
        own["num_hidden_layers"] = layers
    other_names = getattr(type(default), "attribute_map", {})  # Zamba 2 reads its fields before it knows other names
    return {other_names.get(key, key) if key in _KINDS else key: value for key, value in own.items()}


def _is_dropout(key: str, value: object) -> bool:
    return ("dropout" in key or "pdrop" in key or "layerdrop" in key) and isinstance(value, float) and value > 0
