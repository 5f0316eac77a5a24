"""What each rank of a Trainer decides for itself, compared over all ranks before any of them acts on it.

Callbacks decide when to evaluate, save and stop. The arguments of the trainers decide what a step computes, and how
many of them there are. Code of the caller's own calls `train` and `evaluate`.
"""

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from bmburst.errors import UserError
from bmburst.integrations.trainer_arguments import is_library
from bmburst.integrations.transformers import SplitSequences
from bmburst.integrations.transformers_weights import first_difference

_ACTIONS = ("should_log", "should_evaluate", "should_save")
_DECISIONS = (*_ACTIONS, "should_epoch_stop", "should_training_stop")
"""What a callback of a Trainer decides on."""
_OF_A_RANK = """
    local_rank use_cpu disable_tqdm log_on_each_node save_on_each_node logging_nan_inf_filter skip_memory_metrics
    push_to_hub hub_private_repo hub_always_push hub_strategy log_completions num_completions_to_print log_multimodal
    log_unique_prompts seed dataset_num_proc dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor ddp_timeout torch_empty_cache_steps vllm_server_port vllm_group_port vllm_server_timeout
    vllm_gpu_memory_utilization
"""
"""Arguments that concern one process alone. `seed` is that of dropout, too; batches are compared as they are read."""


class _BeginsTogether(TrainerCallback):  # type: ignore[misc]
    """Compares decisions when an epoch begins, before accelerate sends the states of random numbers."""

    def __init__(self, agree: Callable[[], None]) -> None:
        self._agree = agree

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Compare them."""
        self._agree()


class DecidesTogether:
    """A mixin of a Trainer whose ranks log, evaluate, save and stop together.

    Attributes:
        add_callback: The Trainer's own.
        remove_callback: The Trainer's own.
        args: The Trainer's arguments.
        control: The Trainer's own, which callbacks change.
        split: Has the ranks.

    Raises:
        UserError: A class derived from a trainer and the mixin names the trainer first.
    """

    add_callback: Callable[..., None]
    remove_callback: Callable[..., None]
    args: Any
    control: Any
    split: SplitSequences

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the order of the bases: methods of a trainer before the mixin would take the place of the mixin's."""
        super().__init_subclass__(**options)
        before = cls.__mro__[: cls.__mro__.index(DecidesTogether)]
        if (trainer := next(filter(is_library, before), None)) is not None:
            mixin = next(each.__name__ for each in before if DecidesTogether in each.__bases__)
            raise UserError(
                f"{cls.__name__} has {trainer.__name__} before {mixin}, which would have no effect\n"
                f"fix: class {cls.__name__}({mixin}, {trainer.__name__})"
            )

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train, if the trainers of all ranks have the same arguments.

        Raises:
            UserError: They have not, or a rank makes another call.
        """
        found = first_difference(f"train of {type(self).__name__}", _arguments(self.args), self.split.mesh.world)
        if found is not None:
            raise UserError(
                f"the trainers of the ranks have different arguments: {found[0]} of rank {found[1]} is not rank 0's\n"
                "allowed: the same numbers, flags and choices on every rank\n"
                f"fix: set {found[0]} from what all ranks share, not from the rank or the machine"
            )
        begins = _BeginsTogether(self._agree)
        self.add_callback(begins)  # behind all others: a rank that evaluates in one of them is told
        try:
            return super().train(*arguments, **options)  # type: ignore[misc]
        finally:
            self.remove_callback(begins)

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """Run the trainer's own loop, if all ranks evaluate as many samples.

        Raises:
            UserError: They do not, or a rank makes another call.
        """
        source = dataloader.dataset
        size = f"{len(source)} samples" if has_length(source) else "a stream"
        world = self.split.mesh.world
        with world.first_calls("evaluation of a Trainer"):
            world.agree(f"evaluation of {type(self).__name__}\nof {size}")
        return super().evaluation_loop(dataloader, *arguments, **options)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        """Do what callbacks decided if it is the same on all ranks; one that acts alone would wait for ever.

        Raises:
            UserError: Callbacks have decided differently.
        """
        self._agree()
        acts = any(getattr(self.control, name) for name in _ACTIONS)
        super()._maybe_log_save_evaluate(*arguments, **options)  # type: ignore[misc]
        if acts:  # callbacks of what it did may have decided too
            self._agree()

    def _agree(self) -> None:
        world = self.split.mesh.world
        decisions = [f"{name} {getattr(self.control, name)}" for name in _DECISIONS]
        with world.first_calls("a Trainer's decisions"):  # on GPUs, more would let the host wait in every step
            world.agree("\n".join(["TrainerControl", *decisions]))


def _arguments(given: Any) -> dict[str, str]:
    """Return the numbers, flags and choices among the arguments of a Trainer that all ranks share, as text.

    Others are paths and objects, which may differ between machines.
    """
    names = [each.name for each in dataclasses.fields(given) if each.name not in _OF_A_RANK.split()]
    values = {name: getattr(given, name, None) for name in names if not name.startswith("_")}
    return {name: repr(value) if isinstance(value, int | float | Enum) else "" for name, value in values.items()}
