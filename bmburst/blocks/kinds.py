"""Kinds of parameters, by which weight decay, learning rates and gradient norms differ. Imports no torch."""

KINDS = ("embeddings", "attention", "mlp", "head", "norms", "biases")
"""Matrices of the model by their place, and its vectors. An adapter is of the kind of its matrix."""
MATRICES = KINDS[:4]
OUTWARD = "lora_B"
"""Name of the second matrix of an adapter, which LoRA+ trains with a rate of its own."""
_ATTENTION = ("attn", "attention")


def kind_of(name: str, shape: tuple[int, ...]) -> str:
    """Return the kind of a parameter.

    Args:
        name: Its full name, as in Hugging Face's models.
        shape: Its whole shape.
    """
    if len(shape) == 1:
        return "biases" if name.endswith("bias") else "norms"
    if "lm_head" in name:
        return "head"
    if "embed" in name:
        return "embeddings"
    return "attention" if any(word in name for word in _ATTENTION) else "mlp"


def apart(decayed: tuple[str, ...], *, plus: bool) -> frozenset[str]:
    """Return what a block must keep apart from its other parameters, because an optimizer treats it differently.

    A block keeps matrices and vectors apart anyway. Each further group costs a message of its own.

    Args:
        decayed: The kinds that have weight decay.
        plus: Whether the second matrices of adapters have a learning rate of their own.

    Returns:
        Some of "mlp", "biases" and `OUTWARD`.
    """
    pairs = (("attention", "mlp"), ("norms", "biases"))
    found = {second for first, second in pairs if (first in decayed) != (second in decayed)}
    return frozenset(found | ({OUTWARD} if plus else set()))


def group_in_block(name: str, shape: tuple[int, ...], kept_apart: frozenset[str]) -> str:
    """Return the name of a parameter's group among those that a block keeps apart; empty: no group of its own."""
    kind = kind_of(name, shape)
    is_outward = name.rpartition(".")[2] == OUTWARD
    return "_".join(each for each in (kind, OUTWARD if is_outward else "") if each in kept_apart)
