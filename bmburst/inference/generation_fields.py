"""The fields of transformers' GenerationConfig and arguments of its `generate`, and what is done with each of them.

The lists name what is understood: a field of a later version is in none of them, and is noted or refused. Each value
begins with "read", "noted" (not applied, and named in a note), "refused", or "no effect: " and the reason.
"""

from collections.abc import Mapping

from bmburst.config.foreign import by_name

READ, NOTED, REFUSED = "read", "noted", "refused"
_SPEED = "no effect: it changes the speed of transformers, not its tokens"
_ASSISTANT = "no effect: only assisted decoding uses it"
_RANK_0 = "read: every rank evaluates it, and rank 0 decides"
_UNQUANTIZED = (
    *("dynamic", "static", "offloaded", "offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked"),
    *("hybrid", "hybrid_chunked", "sliding_window"),
)
_WITHOUT_EFFECT = {
    "no effect: only beam search uses it": "early_stopping length_penalty diversity_penalty num_beam_groups low_memory",
    _SPEED: "max_cache_len compile_config disable_compile continuous_batching_config",
    _ASSISTANT: """
        num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind
        assistant_ensemble_weight target_lookbehind max_matching_ngram_size speculation_type
    """,
    "no effect: only encoder-decoder models use it": "decoder_start_token_id",
    "no effect: it describes the file": "transformers_version _from_model_config",
}

GENERATOR: Mapping[str, str] = by_name(_WITHOUT_EFFECT) | by_name(
    {
        READ: "max_new_tokens do_sample temperature top_k top_p min_p repetition_penalty stop_strings eos_token_id",
        "noted, if the file has no max_new_tokens": "max_length",
        NOTED: """
            min_length min_new_tokens max_time num_beams num_return_sequences top_h typical_p epsilon_cutoff eta_cutoff
            encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids force_words_ids
            constraints forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens
            begin_suppress_tokens sequence_bias token_healing guidance_scale watermarking_config penalty_alpha
            dola_layers cache_implementation cache_config
        """,
        "no effect: sampling normalizes the probabilities": "renormalize_logits",
        "no effect: a prompt whose logits are NaN is refused": "remove_invalid_values",
        "no effect: there is always a KV cache": "use_cache",
        "no effect: --chunk-tokens sets it": "prefill_chunk_size",
        "no effect: prompts are not padded": "pad_token_id",
        "no effect: the tokenizer adds it": "bos_token_id",
        _SPEED: "use_mtp assistant_early_exit prompt_lookup_num_tokens",
        _ASSISTANT: "is_assistant",
        "no effect: it selects what transformers returns": (
            "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate"
        ),
    }
)
"""Keys of a model's generation_config.json, for `bmburst generate` and `bmburst.Generator`."""

SPLIT_GENERATE: Mapping[str, str] = by_name(_WITHOUT_EFFECT) | by_name(
    {
        READ: """
            max_length max_new_tokens min_length min_new_tokens stop_strings do_sample temperature top_k top_p min_p
            top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty
            no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id
            forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
            begin_suppress_tokens sequence_bias watermarking_config output_scores output_logits
            return_dict_in_generate pad_token_id bos_token_id eos_token_id
        """,
        _RANK_0: "max_time",
        REFUSED: """
            num_beams num_return_sequences use_cache use_mtp cache_implementation cache_config token_healing
            guidance_scale is_assistant prompt_lookup_num_tokens assistant_early_exit penalty_alpha dola_layers
            constraints force_words_ids prefill_chunk_size output_attentions output_hidden_states
        """,
    }
)
"""Fields of GenerationConfig, also as arguments, for `bmburst.integrations.transformers_cache.generate`."""

SPLIT_ARGUMENTS: Mapping[str, str] = by_name(
    {
        READ: "generation_config tokenizer synced_gpus",
        "read: every rank applies it, and rank 0 chooses the token": "logits_processor prefix_allowed_tokens_fn",
        _RANK_0: "stopping_criteria",
        "read: also on one rank alone": "streamer",
    }
)
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
