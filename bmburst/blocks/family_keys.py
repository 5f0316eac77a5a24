"""The keys of a Hugging Face config.json that bmburst understands, by family. Imports no torch.

The reference is transformers 5: a key without effect there has none here. Keys beyond these are refused by name
(`bmburst.config.foreign`), because a key of another model, such as `attn_logit_softcapping` or `no_rope_layers`, would
change what the weights compute.
"""

from collections.abc import Mapping

from bmburst.config.foreign import Key, keys

_SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_HOW_TO_RUN = (
    *("use_cache", "pretraining_tp", "gradient_checkpointing", "chunk_size_feed_forward", "torchscript"),
    *("use_bfloat16", "tf_legacy_loss", "return_dict", "use_return_dict", "output_attentions", "output_hidden_states"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"),
    *("experts_implementation", "_experts_implementation", "_flash_attn_2_enabled", "use_flash_attention"),
)
_ORIGIN = (
    *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "tokenizer_class", "model_max_length"),
    *("max_sequence_length", "keys_to_ignore_at_inference", "transformers.js_config", "is_llama_config"),
    *("unsloth_fixed", "unsloth_version", "prefix", "task_specific_params"),
)
_CLASSIFIER = ("id2label", "label2id", "num_labels", "problem_type", "finetuning_task")
_OTHER_TOKENS = ("unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id")
# transformers' GenerationConfig._get_default_generation_params: transformers 4 wrote them into config.json.
_GENERATION = (
    *("assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens"),
    *("diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
    *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length"),
    *("no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "num_beams"),
    *("num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty"),
    *("return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p", "typical_p"),
)

NOTES: Mapping[str, Key] = {
    **keys(("dtype", "torch_dtype"), "no effect: each tensor has its own; bmburst convert writes the new one"),
    **keys(_HOW_TO_RUN, "no effect: how transformers runs the model, not what it computes"),
    **keys(_ORIGIN, "no effect: a note about the model"),
    **keys(_CLASSIFIER, "no effect: labels of classifiers"),
    **keys(_OTHER_TOKENS, "no effect: the tokenizer's tokens"),
    **keys(_GENERATION, "no effect, as in transformers 5: generation_config.json has the settings of generation"),
}
"""Keys without effect in any model."""

COMMON: Mapping[str, Key] = {
    "model_type": Key("read: the family"),
    "architectures": Key("read: only the family's causal LM, because weights of other classes mean something else"),
    **keys(_SHAPE, "read: the shape of the weights"),
    "num_key_value_heads": Key("read; num_attention_heads if missing or null"),
    "head_dim": Key("read; hidden_size / num_attention_heads if missing or null"),
    "rms_norm_eps": Key("read"),
    "hidden_act": Key("read: two names of one function", ("silu", "swish")),
    "tie_word_embeddings": Key("read; a head in the files that differs from the embedding is kept, as in transformers"),
    "initializer_range": Key("read: initial weights of a model that is trained from scratch"),
    "max_position_embeddings": Key("read: some rotary settings depend on it"),
    **keys(("rope_theta", "rope_scaling", "rope_parameters"), "read: see the rotary settings"),
    "original_max_position_embeddings": Key("read: see the rotary settings"),
    "partial_rotary_factor": Key("read", (None, 1)),
    "attention_bias": Key("read", (False,)),
    "mlp_bias": Key("read", (False,)),
    "bias": Key("read", (None, False)),
    "attention_dropout": Key("read: there is no dropout", (0,)),
    "is_causal": Key("read: attention is causal", (None, True)),
    "rope_interleaved": Key("read", (None, False)),
    "quantization_config": Key("read: weights are not quantized", (None, {})),
    "pruned_heads": Key("read", (None, {}, [])),
    **keys(("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"), "read", None, False),
    "cross_attention_hidden_size": Key("read", (None,)),
    "eos_token_id": Key("read: ends generated text if generation_config.json names no token"),
    "bos_token_id": Key("no effect: the tokenizer adds tokens"),
    "pad_token_id": Key("no effect: its embedding is trained as any other, while transformers keeps it"),
    "decoder_start_token_id": Key("no effect on a causal LM"),
    "is_decoder": Key("no effect on a causal LM"),
    "auto_map": Key("no effect: the code that it names is copied by bmburst convert and never run"),
    **NOTES,
}
"""Keys of every family."""

NO_WINDOW: Mapping[str, Key] = {
    "sliding_window": Key("read: only null"),
    "use_sliding_window": Key("read", (None, False)),
    "max_window_layers": Key("no effect without a window"),
    "layer_types": Key("read: only full_attention, for each layer"),
}
EVERY_LAYER: Mapping[str, Key] = {
    "sliding_window": Key("read: required; null is full attention"),
    "layer_types": Key("read: one type for all layers, full_attention or sliding_attention"),
}
BY_LAYER: Mapping[str, Key] = {
    "use_sliding_window": Key("read: whether there is a window"),
    "sliding_window": Key("read; 4096 if missing"),
    "max_window_layers": Key("read: layers before it have full attention; all layers must have one type"),
    "layer_types": Key("read: one type for all layers, full_attention or sliding_attention"),
    "use_mrope": Key("read", (None, False)),
}
MINICPM: Mapping[str, Key] = {
    **NO_WINDOW,
    **keys(("scale_emb", "scale_depth", "dim_model_base"), "read: required; a factor of the model"),
    "num_experts": Key("read: MiniCPM-MoE has experts", (None, 0)),
    "sparse_config": Key("read: MiniCPM4.1 has sparse attention", (None, {})),
}

ROTARY: Mapping[str, Key] = {
    "rope_type": Key("read: default, linear, dynamic, yarn or llama3"),
    "type": Key("read: the name of rope_type in transformers 4"),
    "rope_theta": Key("read; the key of the same name beside the object if missing"),
    "partial_rotary_factor": Key("read", (None, 1)),
    "factor": Key("read: required unless the type is default"),
    "original_max_position_embeddings": Key(
        "read for yarn and llama3; max_position_embeddings if missing; dynamic begins at max_position_embeddings"
    ),
    **keys(("low_freq_factor", "high_freq_factor"), "read for llama3: required"),
    **keys(("beta_fast", "beta_slow", "attention_factor"), "read for yarn"),
    **keys(("mscale", "mscale_all_dim"), "read for yarn without attention_factor"),
    "truncate": Key("read", (True,)),
    "finetuned": Key("no effect, as in transformers"),
}
"""Keys of `rope_scaling` and `rope_parameters`."""
