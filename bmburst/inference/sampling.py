"""Sampling: generation options, and a sampler that runs on the device without synchronization."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmburst.config import read_json
from bmburst.config.fields import convert_value, field, shown, spec_of
from bmburst.data.tokenizer import GENERATION_CONFIG, TokenIds
from bmburst.errors import UserError, require_known, with_fix
from bmburst.inference.generation_fields import GENERATOR, NOTED, has_effect

_MODEL_CONFIG = "config.json"
_EOS = "eos_token_id"
# Keys of generation_config.json, mapped to fields of `GenerationOptions`.
_KEYS: Mapping[str, str] = {
    **{name: name for name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "stop_strings": "stop",
    _EOS: "eos_ids",
}
# Probabilities are scaled to integers, the largest to 2**40, because integer sums do not depend on their order, while
# parallel float sums differ between devices and batch sizes. Sums over 2**22 tokens stay below 2**63.
_UNIT = 2.0**40


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Generation options, with the names, defaults and meaning of transformers' `generate`.

    The processors run in transformers' order: repetition penalty, temperature, top-k, top-p, min-p. Greedy decoding
    (temperature 0, the default, like do_sample=False in transformers) applies only the repetition penalty.

    Raises:
        UserError: A value has the wrong type or is out of range, a stop string is empty, or `num_samples` is above 1
            with temperature 0.
    """

    max_new_tokens: int = field("New tokens of an answer, at most.", default=20, unit="tokens", minimum=1)
    temperature: float = field("Divides the logits; 0: greedy.", default=0.0, minimum=0)
    top_k: int = field("Sample from this many most probable tokens only; 0: from all.", default=50, minimum=0)
    top_p: float = field(
        "Sample from the most probable tokens whose probabilities add up to this.", default=1.0, minimum=0, maximum=1
    )
    min_p: float = field(
        "Sample from tokens of at least this probability, relative to the most probable one.",
        default=0.0,
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float = field(
        "Divides positive logits of tokens seen before, and multiplies negative ones.", default=1.0, above=0
    )
    seed: int = field("Seed of the random numbers.", default=0, minimum=0, maximum=2**32 - 1)
    stop: tuple[str, ...] = field("Text that ends an answer, which is cut before it.", default=())
    eos_ids: tuple[int, ...] = field("Token ids that end an answer.", default=(), minimum=0)
    num_samples: int = field("Answers to each prompt.", default=1, minimum=1)
    logprobs: int | None = field(
        "Log-probabilities to return: of the chosen token, and of this many most probable ones.",
        default=None,
        minimum=0,
    )

    def __post_init__(self) -> None:
        for name in _FIELDS:
            object.__setattr__(self, name, convert_option(name, name, getattr(self, name)))
        if self.num_samples > 1 and self.is_greedy:
            raise UserError(
                f"num_samples: {self.num_samples} answers to a prompt are all alike with temperature 0\n"
                "allowed: 1 with temperature 0\nfix: temperature 1, or num_samples 1"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is chosen."""
        return self.temperature == 0


_FIELDS = {declared.name: declared for declared in dataclasses.fields(GenerationOptions)}
_TYPES = typing.get_type_hints(GenerationOptions)


def convert_option(label: str, name: str, value: Any) -> Any:
    """Return a value converted to the type of a field of `GenerationOptions`.

    Args:
        label: Name of the option in messages, for example "--top-k".
        name: Name of the field.
        value: The value.

    Raises:
        UserError: The value is not allowed; a message of three lines.
    """
    if name == "stop":
        # Not `convert_value`: a stop string may contain line breaks and commas.
        strings = (value,) if isinstance(value, str) else value
        if not isinstance(strings, list | tuple) or not all(isinstance(each, str) and each for each in strings):
            raise UserError(f"{label}: {shown(value)} does not fit\nallowed: text, not empty\nfix: leave {label} out")
        return tuple(strings)
    declared = _FIELDS[name]
    try:
        return convert_value(label, value, _TYPES[name], spec_of(declared))
    except UserError as error:
        default = "leave it out" if declared.default in ((), None) else f"{label} {declared.default}"
        raise with_fix(error, default) from None


def generation_options(directory: Path | None = None, **given: object) -> GenerationOptions:
    """Return the given options, with defaults from a model's directory.

    Defaults are read from generation_config.json: `max_new_tokens`, `temperature`, `top_k`, `top_p`, `min_p`,
    `repetition_penalty`, `stop_strings` and all ids of `eos_token_id`. Other keys are not applied; `ignored_options`
    returns those that would change the answers. Without `do_sample: true` the default is greedy, for any temperature in
    the file. If the file has no `eos_token_id`, that of config.json is used.

    Args:
        directory: The model's directory; None, or a directory without these files: the defaults of the class.
        given: Fields of `GenerationOptions`; None: not given.

    Raises:
        UserError: A file is damaged, a value in a file or a given value is not allowed, or an option is unknown.
    """
    for name in given:
        require_known("option of generation", name, _FIELDS)
    values = {} if directory is None else _defaults(directory)
    values |= {name: value for name, value in given.items() if value is not None}
    return GenerationOptions(**values)


def own_max_new_tokens(directory: Path | None) -> int | None:
    """Return `max_new_tokens` of a model's generation_config.json, or None; UserError if the file is damaged."""
    return None if directory is None else _defaults(directory).get("max_new_tokens")


def given_options(
    options: GenerationOptions | None, given: Mapping[str, object], make: Callable[..., GenerationOptions]
) -> GenerationOptions:
    """Return the options of a call that takes either options or their fields.

    Args:
        options: The options, or None.
        given: Fields of options.
        make: Returns the options of fields.

    Raises:
        UserError: The options have another type, both are given, or `make` raises it.
    """
    if not isinstance(options, GenerationOptions | None):
        raise UserError(
            f"options must be GenerationOptions, got {type(options).__name__}\n"
            "fix: generator.options(max_new_tokens=64), or max_new_tokens=64 itself"
        )
    if options is not None and given:
        raise UserError(
            f"options and {', '.join(given)} given\nallowed: one of both\n"
            f"fix: generator.options({next(iter(given))}=...), or no options"
        )
    return make(**given) if options is None else options


def ignored_options(directory: Path, max_new_tokens: int | None = None) -> list[str]:
    """Return the keys of a model's generation_config.json that would change the answers, but are not applied.

    A key that `GENERATOR` does not list counts as one of them.

    Args:
        directory: The model's directory.
        max_new_tokens: The user's own; as the file's, it takes the place of `max_length`.

    Raises:
        UserError: The file is damaged.
    """
    stored = _generation_config(directory)
    noted = (key for key in stored if GENERATOR.get(key, NOTED).startswith(NOTED))
    unused = [key for key in noted if has_effect(key, stored[key])]
    most = stored.get("max_new_tokens") if max_new_tokens is None else max_new_tokens
    return [key for key in unused if key != "max_length" or most is None]


def names_ends(directory: Path) -> bool:
    """Return whether a model's generation_config.json names tokens that end an answer; UserError if it is damaged."""
    return _generation_config(directory).get(_EOS) is not None


def _generation_config(directory: Path) -> Mapping[str, Any]:
    path = directory / GENERATION_CONFIG
    return read_json(path) if path.exists() else {}


def _defaults(directory: Path) -> dict[str, Any]:
    path, stored = directory / GENERATION_CONFIG, _generation_config(directory)
    samples = stored.get("do_sample")
    if samples is not None and not isinstance(samples, bool):
        raise _damaged(path, "do_sample", samples, "true or false")
    values = {name: _stored(path, stored, key) for key, name in _KEYS.items() if stored.get(key) is not None}
    values["temperature"] = values.get("temperature", 1.0) if samples else 0.0
    path = directory / _MODEL_CONFIG
    if "eos_ids" not in values and path.exists():
        stored = read_json(path)
        if stored.get(_EOS) is not None:
            values["eos_ids"] = _stored(path, stored, _EOS)
    return values


def _stored(path: Path, stored: Mapping[str, Any], key: str) -> Any:
    name, value = _KEYS[key], stored[key]
    if key == _EOS and not isinstance(value, list):
        value = [value]
    try:
        return convert_option(key, name, value)
    except UserError as error:
        allowed = str(error).splitlines()[1].removeprefix("allowed: ")
        raise _damaged(path, key, stored[key], allowed) from error


def _damaged(path: Path, key: str, value: object, allowed: str) -> UserError:
    return UserError(f"{path}: {key}: {shown(value)} does not fit\nallowed: {allowed}\nfix: correct that file")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SamplerRow:
    """A row of a batch.

    Attributes:
        prompt: Index of its prompt among all prompts of all batches.
        sample: Index among the answers to the prompt.
        tokens: Token ids of the prompt; the repetition penalty applies to them.
    """

    prompt: int
    sample: int = 0
    tokens: Sequence[int] | TokenIds = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Result of a step of a sampler. Log-probabilities are None unless requested.

    Attributes:
        tokens: Chosen tokens, `[rows]` int64.
        logprobs: Log-probabilities of the chosen tokens, `[rows]`, in the dtype of the logits.
        top_ids: The n most probable tokens, `[rows, n]` int64; n is `GenerationOptions.logprobs`.
        top_logprobs: Their log-probabilities, `[rows, n]`.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


class Sampler:
    """Chooses a token for each row of a batch, step by step.

    A step is a sequence of device operations without synchronization, so the device can be ahead of the host. Equal
    logits give equal tokens, on every rank and every type of device, independent of the other rows of the batch:

    - The random numbers of a row depend only on (seed, prompt, sample). They are drawn in advance on the CPU.
    - A token is chosen by inverse transform sampling in integer arithmetic.
    - Greedy rows choose the first of the largest logits.

    A NaN logit is chosen only if all logits of the row are NaN or -inf; the token is then 0.

    Log-probabilities are `log_softmax` of the logits before penalty and temperature, as in OpenAI's API and vLLM.

    Args:
        options: Generation options.
        rows: The rows of the batch.
        vocab_size: Number of logits of a row.
        device: Device of the logits.
    """

    def __init__(
        self, options: GenerationOptions, rows: Sequence[SamplerRow], vocab_size: int, device: torch.device | str
    ) -> None:
        self.options, self.vocab_size = options, vocab_size
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._uniforms = self._seen = None
        if not options.is_greedy:
            self._uniforms = torch.from_numpy(_uniforms(options, rows)).to(device)
        if options.repetition_penalty != 1:
            self._seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
            for index, row in enumerate(rows):
                seen = torch.as_tensor(np.unique(np.asarray(row.tokens, np.int64)))
                self._seen[index].index_fill_(0, seen.to(device), True)

    def step(self, logits: Tensor) -> Sampled:
        """Choose the next token of each row.

        Steps beyond `max_new_tokens` are allowed; their tokens are meaningless.

        Args:
            logits: `[rows, vocab_size]`, fp32 or wider; not modified.
        """
        if self._uniforms is None:
            tokens = self._penalized(logits).argmax(-1)
        else:
            weights = self._weights(self._penalized(logits))
            step = self._step.clamp(max=len(self._uniforms) - 1)
            tokens = _inverse(weights, self._uniforms.index_select(0, step)[0])
            self._step += 1
        if self._seen is not None:
            self._seen.scatter_(1, tokens[:, None], True)
        if self.options.logprobs is None:
            return Sampled(tokens)
        logprobs = logits.log_softmax(-1)
        top = logprobs.topk(min(self.options.logprobs, self.vocab_size), dim=-1)
        return Sampled(tokens, logprobs.gather(1, tokens[:, None])[:, 0], top.indices, top.values)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities with which `step` chooses tokens, `[rows, vocab_size]` fp64. No side effects."""
        logits = self._penalized(logits)
        if self._uniforms is None:
            return torch.zeros_like(logits, dtype=torch.float64).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
        weights = self._weights(logits)
        return weights.double() / weights.sum(-1, keepdim=True)

    def _penalized(self, logits: Tensor) -> Tensor:
        """Return the logits after the repetition penalty, without NaN and +inf."""
        most = torch.finfo(logits.dtype).max
        logits = logits.nan_to_num(nan=-math.inf, posinf=most, neginf=-math.inf)
        if self._seen is None:
            return logits
        penalty = self.options.repetition_penalty
        penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
        return torch.where(self._seen, penalized, logits).clamp(max=most)

    def _weights(self, logits: Tensor) -> Tensor:
        """Return int64 weights `[rows, vocab_size]`: scaled probabilities after temperature, top-k, top-p and min-p.

        The most probable token has the weight `_UNIT`.
        """
        options = self.options
        best = logits.amax(-1, keepdim=True)
        exponents = (logits - best).double() / options.temperature
        odds = exponents.exp().nan_to_num(nan=0.0)  # a row of -inf gives NaN
        if 0 < options.top_k < self.vocab_size:
            # As in transformers, tokens that tie with the k-th are kept.
            least = logits.topk(options.top_k, dim=-1).values[:, -1:]
            odds = odds.masked_fill(logits < least, 0.0)
        weights = (odds * _UNIT).round().long()
        if options.top_p < 1:
            order = logits.sort(dim=-1, descending=True, stable=True).indices
            ordered = weights.gather(1, order)
            sums = ordered.cumsum(-1)
            keep = (sums - ordered).double() < options.top_p * sums[:, -1:].double()
            keep[:, :1] = True
            weights = torch.zeros_like(weights).scatter(1, order, ordered * keep)
        if options.min_p > 0:
            # transformers compares probabilities with min_p times the largest; relative to the largest, that is min_p.
            weights = weights.masked_fill(odds < options.min_p, 0)
        return weights


def _uniforms(options: GenerationOptions, rows: Sequence[SamplerRow]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return `[max_new_tokens, rows]` numbers in [0, 1)."""
    columns = np.empty((options.max_new_tokens, len(rows)))
    for index, row in enumerate(rows):
        # Not torch.Generator: on the CPU it uses only 32 bits of its seed, too few for three integers.
        source = np.random.SeedSequence([options.seed, row.prompt, row.sample])
        columns[:, index] = np.random.Generator(np.random.PCG64(source)).random(options.max_new_tokens)
    return columns


def _inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return for each row the first index whose cumulative weight exceeds `uniforms` times the sum, int64 `[rows]`.

    Args:
        weights: `[rows, n]` int64, not negative.
        uniforms: `[rows]` fp64 in [0, 1).
    """
    sums = weights.cumsum(-1)
    total = sums[:, -1]
    target = torch.minimum((uniforms * total.double()).long(), total - 1)
    return torch.searchsorted(sums, target[:, None], right=True)[:, 0].clamp(max=weights.shape[1] - 1)
