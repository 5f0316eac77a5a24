"""What callbacks of a Trainer decide on each rank for itself, compared over all ranks before any of them acts on it."""

from typing import Any

from bmburst.errors import UserError
from bmburst.integrations.trainer_arguments import is_library
from bmburst.integrations.transformers import SplitSequences

_ACTIONS = ("should_log", "should_evaluate", "should_save")
_DECISIONS = (*_ACTIONS, "should_epoch_stop", "should_training_stop")
"""What a callback of a Trainer decides on."""


class DecidesTogether:
    """A mixin of a Trainer whose ranks log, evaluate, save and stop together.

    Attributes:
        control: The Trainer's own, which callbacks change.
        split: Has the ranks.

    Raises:
        UserError: A class derived from a trainer and the mixin names the trainer first.
    """

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
