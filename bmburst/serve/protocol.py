"""Chat completions of OpenAI's API: reads requests, and makes the objects of responses and errors.

Every field of a request is used, has no effect here, or is refused by name; `FIELDS` lists them.
"""

import dataclasses
import difflib
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from bmburst.config.fields import shown
from bmburst.config.files import parse_json, unique_keys
from bmburst.errors import UserError
from bmburst.inference.sampling import GenerationOptions, convert_option

_NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
"""Fields that are numbers, mapped to those of `GenerationOptions`."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "store": (False,),
}
"""Fields of which only values are accepted that change nothing."""
_WITHOUT_EFFECT = {
    **dict.fromkeys(("user", "safety_identifier", "metadata"), "no effect: names the caller"),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        "no effect: the start of a prompt is always reused where it is cached",
    ),
    "parallel_tool_calls": "no effect: there are no tool calls",
    "service_tier": "no effect: there is one",
}
FIELDS: Mapping[str, str] = {
    "messages": "read: the conversation, as in training; a final message of the assistant is continued",
    "model": "read: the name of the served model",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "read: most tokens of the answer"),
    **dict.fromkeys(("temperature", "top_p", "seed"), "read: as options of `bmburst generate`"),
    "stop": "read: a text or a list of texts that end the answer",
    "stream": "read: whether the answer is sent as it is generated",
    "stream_options": "read: include_usage; no effect: include_obfuscation",
    "top_k": "read: not one of OpenAI's; as an option of `bmburst generate`; -1, as vLLM writes it, is 0: all tokens",
    **dict.fromkeys(("min_p", "repetition_penalty"), "read: not one of OpenAI's; as options of `bmburst generate`"),
    "chat_template_kwargs": "read: not one of OpenAI's; variables of the chat template",
    **{name: f"read: {' or '.join(json.dumps(value) for value in values)} only" for name, values in _ONLY.items()},
    **_WITHOUT_EFFECT,
}
"""Fields of a request: what is done with them. Others are refused; null is the same as a field that is left out."""
_MOST_STOPS = 64


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: Status of HTTP.
        message: The reason.
        code: OpenAI's short name of the reason, or None.
        param: The field at fault, or None.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def to_json(self) -> dict[str, Any]:
        """Return the object of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A request that has been read.

    Attributes:
        line: The conversation, as a line of prompts (`PromptEncoder.line`).
        options: Options of the answer. `max_new_tokens` is a bound only if `is_limited`.
        is_limited: Whether the request limits the tokens of the answer.
        stream: Whether the answer is sent as it is generated.
        include_usage: Whether the last event of a stream holds the numbers of tokens.
    """

    line: dict[str, Any]
    options: GenerationOptions
    is_limited: bool
    stream: bool
    include_usage: bool


def read_question(body: bytes, model: str, defaults: GenerationOptions) -> Question:
    """Return the question of a request.

    Args:
        body: The request's body.
        model: Name of the served model.
        defaults: Options of fields that are left out. Without a seed, an answer that is sampled gets a random one.

    Raises:
        Refusal: It is not JSON, a field is unknown or has a value that is not accepted, or the model is another.
    """
    given = _read_object(body)
    _refuse_unknown(given)
    if (asked := given.get("model", model)) != model:
        raise Refusal(404, f"model {shown(asked)} is not served; allowed: {model!r}", "model_not_found", "model")
    if "messages" not in given:
        raise Refusal(400, "the field messages is missing", "missing_required_parameter", "messages")
    stream, include_usage = _flag(given, "stream"), _read_stream_options(given)
    options = _options(given)
    if "seed" not in options:
        options["seed"] = secrets.randbelow(2**32)
    return Question(
        line={key: given[key] for key in ("messages", "chat_template_kwargs") if key in given},
        options=dataclasses.replace(defaults, **options),
        is_limited="max_new_tokens" in options,
        stream=stream,
        include_usage=include_usage,
    )


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        given = parse_json(body, finite=True, pairs=unique_keys)
    except ValueError as error:
        raise Refusal(400, f"the body {'; '.join(str(error).splitlines())}", "invalid_json") from None
    if not isinstance(given, dict):
        raise Refusal(400, f"the body is {shown(given)}; allowed: a JSON object", "invalid_json")
    return {name: value for name, value in given.items() if value is not None}


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.85)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise Refusal(400, f"the field {name!r} is not supported; {hint}", "unsupported_parameter", name)
        if name not in _ONLY:
            continue
        if not any(type(value) in _same_types(only) and value == only for only in _ONLY[name]):
            allowed = " or ".join(json.dumps(only) for only in _ONLY[name])
            reason = f"{name}: {shown(value)} is not supported; allowed: {allowed}"
            raise Refusal(400, reason, "unsupported_value", name)


def _same_types(value: object) -> tuple[type, ...]:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return (int, float) if is_number else (type(value),)


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise Refusal(400, f"{name}: {shown(value)}; allowed: true or false", "invalid_type", name)
    return value


def _read_stream_options(given: Mapping[str, Any]) -> bool:
    options, known = given.get("stream_options", {}), ("include_usage", "include_obfuscation")
    if not isinstance(options, dict) or not options.keys() <= set(known):
        allowed = f"an object of {' and '.join(known)}"
        raise Refusal(400, f"stream_options: {shown(options)}; allowed: {allowed}", "invalid_value", "stream_options")
    if options and not given.get("stream"):
        raise Refusal(
            400, "stream_options without stream; allowed: with stream true", "invalid_value", "stream_options"
        )
    include_usage, _ = (_flag(options, name) for name in known)
    return include_usage


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields of `GenerationOptions`."""
    options: dict[str, Any] = {}
    for name, option in _NUMBERS.items():
        if name not in given:
            continue
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refusal(400, f"{name}: {shown(value)}; allowed: a number", "invalid_type", name)
        if option in options and options[option] != value:
            raise Refusal(400, f"{name}: {value}, but max_tokens: {options[option]}; give one", "invalid_value", name)
        options[option] = _converted(name, option, 0 if name == "top_k" and value == -1 else value)
    if "stop" in given:
        options["stop"] = _converted("stop", "stop", given["stop"])
        if len(options["stop"]) > _MOST_STOPS:
            raise Refusal(400, f"stop: {len(options['stop'])} texts; allowed: {_MOST_STOPS}", "invalid_value", "stop")
    return options


def _converted(name: str, option: str, value: Any) -> Any:
    try:
        return convert_option(name, option, value)
    except UserError as error:
        raise refusal_of(error, name) from None


def refusal_of(error: UserError, param: str | None = None) -> Refusal:
    """Return the refusal of a request with bad input."""
    text = str(error).replace("that line", "the request")  # messages are checked as those of a file are
    return Refusal(400, "; ".join(text.splitlines()), "invalid_value", param)


def limited(options: GenerationOptions, new_tokens: int) -> GenerationOptions:
    """Return the options with another bound on the tokens of the answer."""
    return dataclasses.replace(options, max_new_tokens=new_tokens)


class Response:
    """Makes the objects of one response.

    Args:
        model: Name of the served model.
    """

    def __init__(self, model: str) -> None:
        self._common = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, text: str, finish: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the object of a whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return {**self._common, "object": "chat.completion", "choices": [choice], "usage": usage}

    def piece(self, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        """Return the object of one event of a stream."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._common, "object": "chat.completion.chunk", "choices": [choice], **more}

    def last(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the object of the last event of a stream with `include_usage`."""
        return {**self._common, "object": "chat.completion.chunk", "choices": [], "usage": usage}


def usage_of(prompt: int, answer: int, cached: int) -> dict[str, Any]:
    """Return the numbers of tokens of prompt and answer, and of the prompt's tokens that were in the cache."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def model_of(name: str, created: int, max_tokens: int) -> dict[str, Any]:
    """Return the object of a model; `max_model_len`, as in vLLM, is the most tokens of prompt and answer."""
    return {"id": name, "object": "model", "created": created, "owned_by": "bmburst", "max_model_len": max_tokens}
