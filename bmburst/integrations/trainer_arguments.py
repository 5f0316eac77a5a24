"""The arguments of transformers' Trainer and TRL's SFTTrainer, and what each of them does on split sequences.

The lists name what was read in transformers 5.23 and 5.24 and in TRL 1.16. An argument of another version is refused if
it is set.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from bmburst.config.foreign import by_name
from bmburst.errors import UserError

Allowed = Mapping[str, tuple[tuple[object, ...], str]]
TRL = "1.16."
"""The version of TRL of which more was read than the arguments."""
_SAME = "read by the Trainer; the same on split sequences"
SHARED = """
    output_dir per_device_train_batch_size num_train_epochs max_steps gradient_accumulation_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps max_grad_norm optim_args optim_target_modules weight_decay
    adam_beta1 adam_beta2 adam_epsilon bf16 fp16 bf16_full_eval fp16_full_eval tf32 use_cache torch_empty_cache_steps
    logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_strategy eval_steps eval_delay per_device_eval_batch_size eval_on_start save_only_model save_strategy
    save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo
    hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end greater_is_better
    ignore_data_skip restore_callback_states_from_checkpoint resume_from_checkpoint full_determinism
    seed data_seed use_cpu dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order dataloader_drop_last
    remove_unused_columns ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend ddp_timeout
    debug skip_memory_metrics do_train do_eval do_predict local_rank trust_remote_code shuffle_dataset
    pad_to_multiple_of model args train_dataset eval_dataset processing_class callbacks optimizers quantization_config
"""
"""Arguments that were read for all of these trainers and are the same on split sequences."""
LOMO = "read; optimizers that step in backward (LOMO) are refused"
_NO_LOGITS = "no effect, because predictions are not gathered"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(repr, values))


_ALLOWED: Allowed = MappingProxyType(
    {
        "auto_find_batch_size": ((False,), "one rank without memory would begin again alone"),
        "average_tokens_across_devices": ((True,), "the loss is the mean over the labels of all ranks"),
        "deepspeed": ((None,), "only DDP and FSDP2 were read"),
        "label_names": ((None, ["labels"], ("labels",)), "the loss is that of the labels"),
        "label_smoothing_factor": ((0,), "the loss is cross entropy"),
        "loss_type": (("nll",), "the loss is cross entropy"),
        "train_sampling_strategy": (
            ("random", "sequential", "group_by_length"),
            "the order of samples may not depend on ranks",
        ),
        "use_liger_kernel": ((False,), "its loss would take the place of the model's"),
    }
)
"""Values that are exact on split sequences, and why no other is."""

_READ: Mapping[str, str] = MappingProxyType(
    {
        _SAME: f"""
            {SHARED}
            torch_compile torch_compile_backend torch_compile_mode activation_checkpointing
            activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs length_column_name
            model_init_kwargs chat_template_path dataset_text_field dataset_kwargs dataset_num_proc
            eos_token pad_token max_length truncation_mode packing packing_strategy padding_free eval_packing
            completion_only_loss assistant_only_loss activation_offloading data_collator model_init
            optimizer_cls_and_kwargs formatting_func
            """,
        _NO_LOGITS: """
            eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
            batch_eval_metrics preprocess_logits_for_metrics
            """,
        "no effect, because Liger-Kernel is refused": "liger_kernel_config",
        LOMO: "optim",
        "read; DistributedDataParallel and FSDP2 average the gradients, other kinds are refused": "fsdp fsdp_config",
        "read; `split_batches` is refused, and `dispatch_batches` with a data set that has a length, because the ranks "
        "of a sequence read the same batches": "accelerator_config",
        "read; predictions are refused, because logits of a long sequence fit on no rank": "prediction_loss_only",
        "read; what TRL logs besides the loss is refused": "metric_for_best_model",
        "read; refused with more than one micro-batch a step, which torch does not support": "ddp_static_graph",
        "read; the noise is that of the whole sequence": "neftune_noise_alpha",
        "read; counts the tokens of the batches, without the padding of a layout": "include_num_input_tokens_seen",
        "read; allowed: cp_size, sp_size and tp_size of 1, because SplitSequences splits": "parallelism_config",
        "read; methods that change each token alone are exact, others are refused": "peft_config",
        "read; the router's loss is that of the tokens of all ranks of a sequence": "router_aux_loss_coef",
        "refused, because the loss is cross entropy": "compute_loss_func",
        "refused, because the logits of a long sequence fit on no rank": "compute_metrics",
    }
)


def done(read: Mapping[str, str], allowed: Allowed) -> Mapping[str, str]:
    """Return what is done with each argument.

    Args:
        read: Names of arguments, separated by spaces, by what is done with them.
        allowed: The arguments of which some values are exact.
    """
    return MappingProxyType(
        by_name(read)
        | {name: f"read; allowed: {_listed(values)}, because {why}" for name, (values, why) in allowed.items()}
    )


ARGUMENTS = done(_READ, _ALLOWED)
"""What is done with each argument of a Trainer and of its TrainingArguments, and of TRL's SFTTrainer and SFTConfig."""


def require_read(
    trainer: type, mixin: type, *, read: Sequence[str], replaced: str, by: str, others: str, in_turns: str | None = None
) -> str:
    """Check, before a trainer reads the data, that its methods were read. Return the name of the library's trainer.

    Args:
        trainer: A class derived from the mixin and a trainer of transformers or TRL.
        mixin: The mixin.
        read: Names of the trainers of transformers and TRL whose methods were read.
        replaced: Name of the method that the mixin replaces.
        by: What it replaces it by, for the message.
        others: What to do with other trainers, for the message.
        in_turns: Name of a method that the mixin calls once for the rows of each rank. Its own result has the gradient
            of the last rows alone.

    Raises:
        UserError: The trainer of transformers or TRL is none of `read`, a class of the caller behind the mixin defines
            the replaced method, or one in front of it the method that it calls in turns.
    """
    kind = next((each.__name__ for each in trainer.__mro__ if is_library(each)), "none")
    if kind not in read:
        raise UserError(
            f"the methods of {kind} were not read, so it is not known to be exact on split sequences\n"
            f"allowed: {', '.join(read)}, and classes derived from them\nfix: {others}; for pairs of answers, bmburst "
            "train (docs/fine_tuning.md)"
        )
    place = trainer.__mro__.index(mixin)
    front = next((each.__name__ for each in trainer.__mro__[:place] if in_turns in vars(each)), None)
    if front is not None:
        raise UserError(
            f"{front} defines {in_turns} in front of {mixin.__name__}, behind backward of other ranks' rows\n"
            f"allowed: that of a class behind {mixin.__name__}, which runs once for the rows of each rank\n"
            f"fix: class Mine({kind}) with {in_turns}, and class {front}({mixin.__name__}, Mine)"
        )
    behind = trainer.__mro__[place + 1 :]
    own = next((each for each in behind if replaced in vars(each) and not is_library(each)), None)
    if own is not None:
        raise UserError(
            f"{own.__name__} defines {replaced}, which {mixin.__name__} would replace by {by}\n"
            "allowed: that of the library\nfix: leave it out; or a loop of your own with a loss of Part.logps"
        )
    return kind


def require_trl(what: str, installed: str | None = None) -> None:
    """Raise UserError unless a part of TRL is of the version that was read.

    Args:
        what: The part.
        installed: The version; default: that of this Python.
    """
    installed = version("trl") if installed is None else installed
    if not installed.startswith(TRL):
        raise UserError(
            f"TRL is {installed}, whose {what} was not read\nallowed: {TRL}*\nfix: pip install 'trl>=1.16,<1.17'"
        )


def require_understood(
    trainer: Any, options: Iterable[str], exact: Allowed = _ALLOWED, known: Mapping[str, str] = ARGUMENTS
) -> None:
    """Check that a Trainer is asked for nothing that means another thing on split sequences.

    Fields and parameters that are defined outside of transformers and TRL are the caller's own.

    Raises:
        UserError: A value is not exact on split sequences, or an argument of transformers or TRL is set that was not
            read.
    """
    for name, (allowed, why) in exact.items():
        value = getattr(trainer.args, name, allowed[0])
        if value not in allowed:
            raise UserError(
                f"{name}={value!r} is not exact on split sequences: {why}\n"
                f"allowed: {_listed(allowed)}\nfix: leave it out"
            )
    parameters = {
        name for each in type(trainer).__mro__ if is_library(each) for name in inspect.signature(each).parameters
    }
    unknown = sorted(({*options} & parameters) - {*known}) + _changed_fields(trainer.args, known)
    if unknown:
        raise UserError(
            f"{unknown[0]} of {type(trainer).__name__} is not known, so it may mean another thing on split sequences\n"
            "allowed: the arguments that docs/settings.md lists\nfix: leave it out"
        )


def _changed_fields(arguments: Any, known: Mapping[str, str]) -> list[str]:
    """Return the fields of transformers and TRL that were not read and do not have their default."""
    found = []
    for owner in filter(is_library, type(arguments).__mro__):
        unknown = {*vars(owner).get("__annotations__", {})} - {*known}
        fields = [
            each.name
            for each in dataclasses.fields(arguments)
            if each.name in unknown and getattr(arguments, each.name) != each.default
        ]
        if fields:  # what a field is by default is known after __post_init__ only, which resets accelerate's state
            plain = owner(output_dir=arguments.output_dir, use_cpu=arguments.use_cpu, report_to="none")
            found += [name for name in fields if getattr(arguments, name) != getattr(plain, name)]
    return found


def is_library(owner: type) -> bool:
    """Return whether a class is one of transformers or TRL."""
    return owner.__module__.split(".")[0] in ("transformers", "trl")
