"""The fields of transformers' GenerationConfig and arguments of its `generate`, and what is done with each of them.

The lists name what is understood: a field of a later version is in none of them, and is noted or refused. Each value
begins with "read", "noted" (not applied, and named in a note), "refused", or "no effect: " and the reason.
"""

from collections.abc import Mapping

READ, NOTED, REFUSED = "read", "noted", "refused"
_BEAMS = "no effect: only beam search uses it"
_SPEED = "no effect: it changes the speed of transformers, not its tokens"
_ASSISTANT = "no effect: only assisted decoding uses it"
_OTHER = "no effect: only encoder-decoder models use it"
_OUTPUT = "no effect: it selects what transformers returns"
_ABOUT = "no effect: it describes the file"
_RANK_0 = "read: every rank evaluates it, and rank 0 decides"
_UNQUANTIZED = (
    "dynamic",
    "static",
    "offloaded",
    "offloaded_static",
    "offloaded_hybrid",
    "offloaded_hybrid_chunked",
    "hybrid",
    "hybrid_chunked",
    "sliding_window",
)

_WITHOUT_EFFECT: Mapping[str, str] = {
    "early_stopping": _BEAMS,
    "length_penalty": _BEAMS,
    "diversity_penalty": _BEAMS,
    "num_beam_groups": _BEAMS,
    "low_memory": _BEAMS,
    "max_cache_len": _SPEED,
    "compile_config": _SPEED,
    "disable_compile": _SPEED,
    "continuous_batching_config": _SPEED,
    "num_assistant_tokens": _ASSISTANT,
    "num_assistant_tokens_schedule": _ASSISTANT,
    "assistant_confidence_threshold": _ASSISTANT,
    "assistant_lookbehind": _ASSISTANT,
    "assistant_ensemble_weight": _ASSISTANT,
    "target_lookbehind": _ASSISTANT,
    "max_matching_ngram_size": _ASSISTANT,
    "speculation_type": _ASSISTANT,
    "decoder_start_token_id": _OTHER,
    "transformers_version": _ABOUT,
    "_from_model_config": _ABOUT,
}

GENERATOR: Mapping[str, str] = {
    **_WITHOUT_EFFECT,
    "max_new_tokens": READ,
    "do_sample": READ,
    "temperature": READ,
    "top_k": READ,
    "top_p": READ,
    "min_p": READ,
    "repetition_penalty": READ,
    "stop_strings": READ,
    "eos_token_id": READ,
    "max_length": "noted, if the file has no max_new_tokens",
    "min_length": NOTED,
    "min_new_tokens": NOTED,
    "max_time": NOTED,
    "num_beams": NOTED,
    "num_return_sequences": NOTED,
    "top_h": NOTED,
    "typical_p": NOTED,
    "epsilon_cutoff": NOTED,
    "eta_cutoff": NOTED,
    "encoder_repetition_penalty": NOTED,
    "no_repeat_ngram_size": NOTED,
    "encoder_no_repeat_ngram_size": NOTED,
    "bad_words_ids": NOTED,
    "force_words_ids": NOTED,
    "constraints": NOTED,
    "forced_bos_token_id": NOTED,
    "forced_eos_token_id": NOTED,
    "exponential_decay_length_penalty": NOTED,
    "suppress_tokens": NOTED,
    "begin_suppress_tokens": NOTED,
    "sequence_bias": NOTED,
    "token_healing": NOTED,
    "guidance_scale": NOTED,
    "watermarking_config": NOTED,
    "penalty_alpha": NOTED,
    "dola_layers": NOTED,
    "cache_implementation": NOTED,
    "cache_config": NOTED,
    "renormalize_logits": "no effect: sampling normalizes the probabilities",
    "remove_invalid_values": "no effect: a prompt whose logits are NaN is refused",
    "use_cache": "no effect: there is always a KV cache",
    "prefill_chunk_size": "no effect: --chunk-tokens sets it",
    "pad_token_id": "no effect: prompts are not padded",
    "bos_token_id": "no effect: the tokenizer adds it",
    "use_mtp": _SPEED,
    "is_assistant": _ASSISTANT,
    "assistant_early_exit": _SPEED,
    "prompt_lookup_num_tokens": _SPEED,
    "output_attentions": _OUTPUT,
    "output_hidden_states": _OUTPUT,
    "output_scores": _OUTPUT,
    "output_logits": _OUTPUT,
    "return_dict_in_generate": _OUTPUT,
}
"""Keys of a model's generation_config.json, for `bmburst generate` and `bmburst.Generator`."""

SPLIT_GENERATE: Mapping[str, str] = {
    **_WITHOUT_EFFECT,
    "max_length": READ,
    "max_new_tokens": READ,
    "min_length": READ,
    "min_new_tokens": READ,
    "max_time": _RANK_0,
    "stop_strings": READ,
    "do_sample": READ,
    "temperature": READ,
    "top_k": READ,
    "top_p": READ,
    "min_p": READ,
    "top_h": READ,
    "typical_p": READ,
    "epsilon_cutoff": READ,
    "eta_cutoff": READ,
    "repetition_penalty": READ,
    "encoder_repetition_penalty": READ,
    "no_repeat_ngram_size": READ,
    "encoder_no_repeat_ngram_size": READ,
    "bad_words_ids": READ,
    "renormalize_logits": READ,
    "forced_bos_token_id": READ,
    "forced_eos_token_id": READ,
    "remove_invalid_values": READ,
    "exponential_decay_length_penalty": READ,
    "suppress_tokens": READ,
    "begin_suppress_tokens": READ,
    "sequence_bias": READ,
    "watermarking_config": READ,
    "output_scores": READ,
    "output_logits": READ,
    "return_dict_in_generate": READ,
    "pad_token_id": READ,
    "bos_token_id": READ,
    "eos_token_id": READ,
    "num_beams": REFUSED,
    "num_return_sequences": REFUSED,
    "use_cache": REFUSED,
    "use_mtp": REFUSED,
    "cache_implementation": REFUSED,
    "cache_config": REFUSED,
    "token_healing": REFUSED,
    "guidance_scale": REFUSED,
    "is_assistant": REFUSED,
    "prompt_lookup_num_tokens": REFUSED,
    "assistant_early_exit": REFUSED,
    "penalty_alpha": REFUSED,
    "dola_layers": REFUSED,
    "constraints": REFUSED,
    "force_words_ids": REFUSED,
    "prefill_chunk_size": REFUSED,
    "output_attentions": REFUSED,
    "output_hidden_states": REFUSED,
}
"""Fields of GenerationConfig, also as arguments, for `bmburst.integrations.transformers_cache.generate`."""

SPLIT_ARGUMENTS: Mapping[str, str] = {
    "generation_config": READ,
    "logits_processor": "read: every rank applies it, and rank 0 chooses the token",
    "prefix_allowed_tokens_fn": "read: every rank applies it, and rank 0 chooses the token",
    "stopping_criteria": _RANK_0,
    "streamer": "read: also on one rank alone",
    "tokenizer": READ,
    "synced_gpus": READ,
}
"""Arguments of transformers' `generate` other than fields of GenerationConfig, for the same function."""

IDLE: Mapping[str, tuple[object, ...]] = {
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "top_h": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "token_healing": (False,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "use_cache": (True,),
    "use_mtp": (False,),
    "is_assistant": (False,),
    "cache_implementation": _UNQUANTIZED,
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}
"""Values besides null that change no token in transformers 5."""


def has_effect(name: str, value: object) -> bool:
    """Return whether a field's value changes what transformers does without the field."""
    return value is not None and value not in IDLE.get(name, ())
