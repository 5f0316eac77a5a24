"""The steps of transformers' `generate` over a split cache: what each step computes, and what all ranks agree on.

**A prompt and a change of the frequencies.** transformers prepares the inputs of each step. Before the first step, the
prompt is computed over all ranks except for its last token. Phi-3 drops its cache where a text becomes longer than the
original length, because all its keys change; the text is then computed again in the same way.

**One decision.** Each step, the ranks exchange their new tokens, whether each text ends, and whether code of the user
has raised an exception: three integers a text. All of them go on with the tokens and ends of rank 0. So a clock, a
criterion of the user, or logits that differ in the last bit never let one rank end before another.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from bmburst.comm.checks import CheckedCommunicator
from bmburst.errors import UserError, first_line
from bmburst.integrations.transformers_code import CACHES
from bmburst.integrations.transformers_recurrent import keeps_states

T = TypeVar("T")


def cache_argument(model: torch.nn.Module) -> str:
    """Return the argument of a model's forward function that takes a cache."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHES if name in parameters), CACHES[-1])


def takes_positions(model: torch.nn.Module) -> bool:
    """Return whether a model's forward function takes positions. Models without any attention do not."""
    return "position_ids" in inspect.signature(model.forward).parameters


class Together:
    """What the ranks of a text agree on at each step.

    Args:
        comm: The ranks that compute the same texts.
    """

    def __init__(self, comm: CheckedCommunicator) -> None:
        self._comm = comm
        self._errors: list[Exception] = []

    def guarded(self, call: Callable[[], T], otherwise: T) -> T:
        """Return the result of the user's own code. All ranks raise its exception after the step, not one alone."""
        if self._errors:
            return otherwise
        try:
            return call()
        except Exception as error:  # raised by `step` or `finish`
            self._errors.append(error)
            return otherwise

    def step(self, input_ids: Tensor, ends: Tensor) -> Tensor:
        """Replace the newest tokens by those of rank 0; return which texts end on rank 0, `[batch]` bool.

        Args:
            input_ids: `[batch, tokens]`; the last column is overwritten.
            ends: Which texts end on this rank, `[batch]` bool.

        Raises:
            UserError: Code of the user raised an exception on another rank; on its own rank, it is raised itself.
        """
        failed = torch.full_like(input_ids[:, -1], bool(self._errors))
        (ranks,) = self._comm.all_gather(torch.stack((input_ids[:, -1], ends.to(input_ids.dtype), failed))).wait()
        if bool(ranks[:, 2].any()):
            self._raise()
        input_ids[:, -1] = ranks[0, 0]
        return ranks[0, 1].bool()

    def finish(self) -> None:
        """Raise the exception of a streamer's last call. Every rank has ended."""
        if self._errors:
            raise self._errors[0]

    def _raise(self) -> None:
        def decide() -> tuple[None, str]:
            if self._errors:
                kind, said = type(self._errors[0]).__name__, first_line(self._errors[0])
                raise UserError(
                    f"generate has ended because of an exception on rank {self._comm.rank}: {kind}: {said}\n"
                    "fix: correct the streamer, stopping criterion or logits processor that raised it"
                )
            return None, "generate"

        try:
            with self._comm.checking():
                self._comm.decided(decide)
        except UserError:
            self.finish()
            raise


class _Ends(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that every rank evaluates, and of which the results of rank 0 count."""

    def __init__(self, criteria: StoppingCriteriaList, together: Together) -> None:
        super().__init__(criteria)
        self._together = together

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See `StoppingCriteria`."""
        none = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        ends: Tensor = self._together.guarded(lambda: super(_Ends, self).__call__(input_ids, scores, **kwargs), none)
        return self._together.step(input_ids, ends)


class _Processors(LogitsProcessorList):  # type: ignore[misc]
    """Logits processors whose exceptions all ranks raise."""

    def __init__(self, processors: LogitsProcessorList, together: Together) -> None:
        super().__init__(processors)
        self._together = together

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """See `LogitsProcessor`."""
        return self._together.guarded(lambda: super(_Processors, self).__call__(input_ids, scores, **kwargs), scores)


class Streamer:
    """A streamer whose exceptions all ranks raise.

    Args:
        streamer: The user's own, maybe on this rank alone.
        together: What the ranks agree on.
    """

    def __init__(self, streamer: Any, together: Together) -> None:
        self._streamer, self._together = streamer, together

    def put(self, value: Tensor) -> None:
        """See `BaseStreamer`."""
        self._together.guarded(lambda: self._streamer.put(value), None)

    def end(self) -> None:
        """See `BaseStreamer`."""
        self._together.guarded(self._streamer.end, None)


@contextmanager
def split_steps(model: PreTrainedModel, cache: Any, together: Together, prompt: int) -> Iterator[None]:
    """Let `model.generate` compute over the ranks of a `SplitCache`, as in the module's docstring.

    Args:
        model: The model of transformers itself, not a wrapper.
        cache: The cache that `model.generate` gets.
        together: What the ranks agree on.
        prompt: Tokens of the prompt.
    """
    prepare, criteria, processors = (
        model.prepare_inputs_for_generation,
        model._get_stopping_criteria,
        model._get_logits_processor,
    )

    # A model that keeps states in a cache of its own class takes no other cache with use_cache=True.
    own_cache = {"use_cache": False} if keeps_states(model) else {}
    name = cache_argument(model)

    def prepared(input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        length = input_ids.shape[1]
        kwargs["next_sequence_length"] = 1
        if cache.get_seq_length() >= length:  # synced_gpus: this text has ended, texts of other ranks have not
            cache.crop(length - 1)
        inputs: dict[str, Any] = prepare(input_ids, **kwargs)
        if inputs.get(name) is None and cache.rotated_for < length:
            cache.reset()
        if cache.get_seq_length() < length - 1:
            cache.prefill(model, input_ids[:, cache.get_seq_length() : length - 1], length=length)
            inputs = prepare(input_ids, **kwargs)
        if inputs.get(name) is None:  # the model has dropped the cache, which is already computed anew
            inputs = GenerationMixin.prepare_inputs_for_generation(model, input_ids, **kwargs)
        if not cache.split_layers:  # no layer needs a mask, but Mamba would multiply one by the new token alone
            inputs["attention_mask"], cache.passed = None, length
        cache.of_prompt = length == prompt
        return inputs | own_cache

    with (
        _replaced(model, "prepare_inputs_for_generation", prepared),
        _replaced(model, "_get_stopping_criteria", lambda *a, **k: _Ends(criteria(*a, **k), together)),
        _replaced(model, "_get_logits_processor", lambda *a, **k: _Processors(processors(*a, **k), together)),
    ):
        yield


@contextmanager
def _replaced(model: PreTrainedModel, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one model."""
    own = vars(model).get(name)
    setattr(model, name, method)
    try:
        yield
    finally:
        delattr(model, name)
        if own is not None:
            setattr(model, name, own)
