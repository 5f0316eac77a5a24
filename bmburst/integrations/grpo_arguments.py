"""The arguments of TRL's GRPOTrainer and RLOOTrainer, and what each of them does on split sequences.

The lists name what was read in TRL 1.16, and in transformers 5.23 and 5.24.
"""

from collections.abc import Mapping
from types import MappingProxyType

from bmburst.integrations.trainer_arguments import LOMO, SHARED, done

_SAME = "read by TRL; the same, because every rank keeps its own rows"
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")

ALLOWED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "auto_find_batch_size": ((False,), "one rank without memory would begin again alone"),
        "cast_lm_head_to_fp32": ((False,), "the head multiplies in the model's dtype and adds in fp32 in any case"),
        "ddp_static_graph": ((None, False), "a step has as many backward passes as ranks that share rows"),
        "deepspeed": ((None,), "only DDP and FSDP2 were read"),
        "importance_sampling_level": (("token", "sequence"), "others were not read"),
        "include_num_input_tokens_seen": (("no", False), "TRL counts tokens itself"),
        "label_smoothing_factor": ((0,), "TRL ignores it"),
        "loss_type": (_LOSSES, "others were not read"),
        "neftune_noise_alpha": ((None,), "ranks that share a row would draw different noise"),
        "parallelism_config": ((None,), "SplitSequences splits"),
        "top_entropy_quantile": ((1.0,), "the quantile is over all rows, but ranks compute them in turn"),
        "torch_compile": ((False,), "a compiled model computes all logits of a row at once"),
        "train_sampling_strategy": (("random",), "TRL has a sampler of its own"),
        "use_adaptive_entropy": ((False,), "the coefficient follows all rows, but ranks compute them in turn"),
        "use_liger_kernel": ((False,), "it replaces functions of the model"),
        "use_transformers_continuous_batching": ((False,), "its attention was not read"),
    }
)
"""Values that are exact on split sequences, and why no other is."""

_READ: Mapping[str, str] = MappingProxyType(
    {
        _SAME: f"""
            {SHARED}
            prediction_loss_only eval_accumulation_steps eval_do_concat_batches accelerator_config disable_dropout
            num_generations num_generations_eval max_completion_length ds3_gather_for_generation generation_batch_size
            steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty
            cache_implementation beta num_iterations epsilon delta epsilon_high sapo_temperature_neg
            sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg reward_weights
            multi_objective_aggregation scale_rewards mask_truncated_completions sync_ref_model ref_model_mixup_alpha
            ref_model_sync_steps entropy_coef max_tool_calling_iterations off_policy_mask_threshold
            use_bias_correction_kl normalize_advantages reward_clip_range log_completions num_completions_to_print
            log_unique_prompts log_completions_hub_repo reward_funcs reward_processing_classes tools rollout_func
            environment_factory metric_for_best_model
            """,
        "read by TRL; vLLM has attention of its own": """
            use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex
            vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
            vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
            vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
            vllm_importance_sampling_clip_min vllm_importance_sampling_cap
            """,
        "no effect, because `use_adaptive_entropy` is refused": (
            "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
        ),
        "no effect, because `use_transformers_continuous_batching` is refused": (
            "use_transformers_paged transformers_continuous_batching_config"
        ),
        "no effect, because Liger-Kernel is refused": "liger_kernel_config",
        "no effect, because `torch_compile` is refused": "torch_compile_backend torch_compile_mode",
        "no effect, because TRL computes no metrics of predictions and counts tokens itself": """
            average_tokens_across_devices batch_eval_metrics eval_use_gather_object include_for_metrics label_names
            length_column_name
            """,
        "no effect, because images are refused": "log_multimodal",
        LOMO: "optim",
        "read; `bmburst.integrations.transformers.recompute` takes its place where it was called": (
            "gradient_checkpointing gradient_checkpointing_kwargs "
            "activation_checkpointing activation_checkpointing_kwargs"
        ),
        "read; DistributedDataParallel and FSDP2 average the gradients, other kinds are refused": "fsdp fsdp_config",
        'read; `attn_implementation` is "bmburst", and `use_kernels` is refused': "model_init_kwargs",
        "read; methods that change each token alone are exact, others are refused": "peft_config",
        "read; the router's loss is that of each rank's rows, and refused with `share_prompts`": "router_aux_loss_coef",
    }
)

ARGUMENTS = done(_READ, ALLOWED)
"""What is done with each argument of GRPOTrainer and RLOOTrainer, and of their configurations."""
