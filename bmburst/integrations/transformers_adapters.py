"""Checks that adapters of PEFT are exact on split sequences: that they change each token alone, and add no loss.

Tied LoRA is checked too. PEFT makes the weights of a head's adapter as transposed views of those of the embedding's.
Moving or converting the model copies each of them, and then the two train apart without a word.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from bmburst.errors import UserError
from bmburst.integrations.transformers_modules import Modules

_READ = """
    LORA BEFT C3A DEFT DELORA FOURIERFT GLORA GRALORA HIRA HRA IA3 LN_TUNING LOHA LOKR MISS OFT OSF PEANUT PSOFT
    RANDLORA ROAD SHIRA SUPERTUNING TINYLORA TRAINABLE_TOKENS UNILORA VBLORA VERA WAVEFT
"""
BY_TOKEN = frozenset(_READ.split())
"""The methods of PEFT 0.21 that change the result of a layer for each token alone."""


def require_adapters(modules: Modules) -> None:
    """Check that the adapters of a model, if its modules have any, are exact on split sequences.

    Raises:
        UserError: A method of PEFT adds tokens, looks for tokens, mixes tokens, or adds to the loss; or it was not
            read. Or LoRA with `ensure_weight_tying` trains, and adapters of tied layers no longer share their weights.
    """
    for adapter, config in _configs(modules):
        kind = getattr(config, "peft_type", None)
        name = str(getattr(kind, "value", kind))
        if (problem := _problem(name, config)) is not None:
            raise UserError(
                f"adapters of PEFT's {name} are not exact on a split sequence: {problem[0]}\n"
                f"allowed: methods that change each token alone, such as LoRA, DoRA and IA3\nfix: {problem[1]}"
            )
        if getattr(config, "target_modules_to_tie", None) and not _are_tied(modules, adapter):
            tied = ", ".join(sorted(config.target_modules_to_tie))
            raise UserError(
                f"ensure_weight_tying of PEFT's {name} has no effect: the adapters of the embedding and of {tied} no "
                "longer share their weights, because the model was moved or converted after get_peft_model\n"
                "fix: the embedding in modules_to_save, not in target_modules: it stays tied; or get_peft_model after "
                "model.float().to(device)"
            )


def _configs(modules: Modules) -> Iterator[tuple[str, Any]]:
    """Return the names and configurations of all adapters in a model."""
    found: dict[int, tuple[str, Any]] = {}
    for module in modules.having("peft_config"):
        adapters = getattr(module, "peft_config", None)
        if isinstance(adapters, dict):
            found |= {id(config): (name, config) for name, config in adapters.items()}
    yield from found.values()


def _are_tied(modules: Modules, adapter: str) -> bool:
    """Return whether LoRA of layers with a common weight has common weights too, or is not trained."""
    embeddings: dict[int, tuple[Tensor, Tensor]] = {}
    heads: list[tuple[int, tuple[Tensor, Tensor]]] = []
    for module in modules.every:
        of_embedding, of_matrix = getattr(module, "lora_embedding_A", {}), getattr(module, "lora_A", {})
        if adapter in of_embedding:
            pair = (of_embedding[adapter], module.lora_embedding_B[adapter])
            embeddings[id(_base(module))] = pair
        elif adapter in of_matrix:
            heads.append((id(_base(module)), (of_matrix[adapter].weight, module.lora_B[adapter].weight)))
    for base, (head_a, head_b) in heads:
        a, b = embeddings.get(base, (head_b, head_a))
        is_trained = any(weight.requires_grad for weight in (a, b, head_a, head_b))
        if is_trained and (_memory(a), _memory(b)) != (_memory(head_b), _memory(head_a)):
            return False
    return True


def _base(module: Any) -> Tensor:
    """Return the weight that an adapter adds to."""
    found: Tensor = module.get_base_layer().weight
    return found


def _memory(weight: Tensor) -> int:
    """Return where a weight, or this rank's shard of it, begins in memory."""
    return getattr(weight, "_local_tensor", weight).data_ptr()


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
