"""Suggests the nearest known name for an unknown one: first by other trainers' names, then last part, then spelling.

nearest_name("learning-rate", fields)    # "optimizer.lr"
nearest_name("training.seq_len", fields) # "sequence_length"
"""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

# Maps our name to the names in transformers, TRL, torchtitan, Megatron-LM, DeepSpeed, axolotl, LLaMA-Factory and vLLM.
# A key has several names where commands differ; a command has one of them.
_ELSEWHERE: Mapping[tuple[str, ...], str] = MappingProxyType(
    {
        ("optimizer.lr",): "learning_rate peak_lr max_lr",
        ("optimizer.beta1",): "adam_beta1 beta_1",
        ("optimizer.beta2",): "adam_beta2 beta_2",
        ("optimizer.eps",): "adam_epsilon adam_eps epsilon",
        ("optimizer.weight_decay",): "wd decay",
        ("optimizer.clip_norm",): "max_grad_norm max_norm clip_grad clip_grad_norm grad_clip gradient_clipping",
        ("optimizer.offload", "optimizer_offload"): "cpu_offload offload offload_optimizer optimizer_cpu_offload",
        ("optimizer.offload_weights",): "offload_param offload_params param_offload",
        ("schedule.kind",): "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
        ("schedule.warmup_steps",): "warmup num_warmup_steps lr_warmup_iters warmup_ratio lr_warmup_steps",
        ("schedule.final_lr_fraction",): "min_lr min_lr_ratio min_lr_factor lr_min",
        (
            "sequence_length",
            "seq",
            "tokens",
        ): "seq_len seq_length seqlen max_length max_seq_length max_seq_len "
        "block_size cutoff_len context_length model_max_length max_model_len ctx context sequence_length sequence_len",
        ("steps",): "epochs num_epochs num_train_epochs max_steps max_iters train_iters train_steps total_steps",
        ("batch_size", "batch"): "global_batch_size train_batch_size gradient_accumulation_steps gradient_accumulation "
        "grad_accum",
        ("micro_batch_size",): "per_device_train_batch_size local_batch_size train_micro_batch_size_per_gpu",
        ("dtype",): "bf16 fp16 precision mixed_precision torch_dtype compute_dtype half",
        ("recompute",): "gradient_checkpointing activation_checkpoint activation_checkpointing recompute_granularity",
        ("init_from", "checkpoint"): "model_name model_name_or_path model_path base_model pretrained checkpoint model "
        "load initial_load_path",
        ("model", "preset"): "model_name model_type arch flavor preset model_name_or_path model_path base_model",
        ("output",): "output_dir output_path save save_dir save_path dump_folder",
        ("checkpoint_every",): "save_steps save_interval save_every save_freq checkpoint_interval checkpoint_steps",
        ("keep_checkpoints",): "save_total_limit keep_latest_k",
        ("eval_every",): "eval_steps eval_interval eval_freq",
        ("eval_sequences",): "eval_iters max_eval_samples",
        ("resume",): "resume_from_checkpoint resume_from auto_resume continue",
        ("data", "data.source", "input"): "dataset datasets dataset_name dataset_path data_path train_file train_data "
        "train_files training_data",
        ("data.tokenizer", "tokenizer"): "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_model",
        ("data.chat_template", "chat_template"): "template chat_template_path",
        ("pack",): "packing sample_packing pack_sequences",
        ("lora.rank", "lora"): "lora_r lora_rank r rank peft adapter",
        ("lora.alpha",): "lora_alpha alpha",
        ("lora.targets",): "lora_target lora_target_modules target_modules",
        ("nproc", "gpus"): "num_gpus n_gpus gpus ngpu nproc_per_node num_processes world_size devices ranks",
        ("data_parallel", "parallel.data_parallel"): "dp data_parallel_size data_parallel_degree dp_size",
        ("sequence_parallel", "parallel.sequence_parallel"): "cp sp context_parallel context_parallel_size cp_size "
        "context_parallel_degree sequence_parallel_size sequence_parallel_degree sp_size ring_degree",
        ("tensor_parallel", "parallel.tensor_parallel"): "tp tensor_parallel_size tensor_parallel_degree tp_size "
        "tensor_model_parallel_size",
        (
            "head_parallel",
            "parallel.head_parallel",
        ): "ulysses ulysses_degree ulysses_size ulysses_sequence_parallel_size",
        ("kernel", "parallel.kernel"): "attn_implementation attention_backend flash_attn attn attn_type",
        ("parallel.zero_level",): "zero zero_stage stage",
        ("max_new_tokens", "sample_tokens"): "max_tokens n_predict num_tokens new_tokens",
        ("num_samples",): "n num_return_sequences num_generations",
        ("wandb",): "report_to wandb_project",
    }
)


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that the user most likely meant, or None.

    Args:
        name: The given name, with dots, hyphens or underscores.
        known: Dotted names with underscores.
    """
    known = list(known)
    name = name.replace("-", "_").lower()
    leaf = name.rpartition(".")[2]
    same_leaf = [other for other in known if other.rpartition(".")[2] == leaf]
    if same_leaf:
        return difflib.get_close_matches(name, same_leaf, n=1, cutoff=0.0)[0]
    for ours, theirs in _ELSEWHERE.items():
        if leaf in theirs.split() and (found := next((each for each in ours if each in known), None)):
            return found
    by_leaf = {other.rpartition(".")[2]: other for other in known}
    near = difflib.get_close_matches(name, known, n=1)
    near = near or [by_leaf[each] for each in difflib.get_close_matches(leaf, by_leaf, n=1)]
    return near[0] if near else None
