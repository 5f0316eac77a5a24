"""Checks that adapters of PEFT are exact on split sequences: that they change each token alone, and add no loss."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from bmburst.errors import UserError

_READ = """
    LORA BEFT C3A DEFT DELORA FOURIERFT GLORA GRALORA HIRA HRA IA3 LN_TUNING LOHA LOKR MISS OFT OSF PEANUT PSOFT
    RANDLORA ROAD SHIRA SUPERTUNING TINYLORA TRAINABLE_TOKENS UNILORA VBLORA VERA WAVEFT
"""
BY_TOKEN = frozenset(_READ.split())
"""The methods of PEFT 0.21 that change the result of a layer for each token alone."""


def require_adapters(model: nn.Module) -> None:
    """Check that the adapters of a model, if it has any, are exact on split sequences.

    Raises:
        UserError: A method of PEFT adds tokens, looks for tokens, mixes tokens, or adds to the loss; or it was not
            read.
    """
    for config in _configs(model):
        kind = getattr(config, "peft_type", None)
        name = str(getattr(kind, "value", kind))
        if (problem := _problem(name, config)) is not None:
            raise UserError(
                f"adapters of PEFT's {name} are not exact on a split sequence: {problem[0]}\n"
                f"allowed: methods that change each token alone, such as LoRA, DoRA and IA3\nfix: {problem[1]}"
            )


def _configs(model: nn.Module) -> Iterator[Any]:
    """Return the configurations of all adapters in a model."""
    found: dict[int, Any] = {}
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        if isinstance(adapters, dict):
            found |= {id(config): config for config in adapters.values()}
    yield from found.values()


def _problem(name: str, config: Any) -> tuple[str, str] | None:
    """Return why a method is not exact, and the fix; None if it is exact."""
    another = "LoraConfig"
    if getattr(config, "is_prompt_learning", False):
        return "it adds tokens to the part of each rank", another
    if getattr(config, "alora_invocation_tokens", None) is not None:
        return "it looks for alora_invocation_tokens, which may be on another rank", "without alora_invocation_tokens"
    if name == "ADALORA":
        if not config.orth_reg_weight:
            return None
        return f"it adds to the loss, orth_reg_weight={config.orth_reg_weight:g}", "orth_reg_weight=0.0, or LoraConfig"
    return None if name in BY_TOKEN else ("it is not known to change each token alone", another)
