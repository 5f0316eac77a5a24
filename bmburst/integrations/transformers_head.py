"""Makes a causal LM of transformers return its loss instead of logits, which do not fit in memory for long sequences.

The logits of 65,536 tokens with a vocabulary of 128,256 take 15.7 GiB in bfloat16, and their gradient takes the same
again. During a call of the model, the forward function of its head is replaced. It computes head and loss in one, a
chunk of tokens at a time (`bmburst_ops.linear_cross_entropy`), and returns the sum as the first of the logits of one
token, `[1, 1, vocabulary]`. So wrappers of the model keep working: FSDP2 gathers the head's weight, and sees the output
where backward begins.

A model that changes its logits after the head (softcap, scale, forbidden tokens) would change the loss. This is
detected: the model then returns something other than the result of the head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from bmburst_ops.linear_cross_entropy import linear_cross_entropy


class _LossHead:
    """The forward function of a head for one call of the model."""

    def __init__(self, head: nn.Linear, labels: Tensor) -> None:
        self._head, self._labels = head, labels
        self.loss: Tensor | None = None
        self.calls = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        weight = self._head.weight
        if torch.is_autocast_enabled(hidden.device.type):
            low = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(low), weight.to(low)
        is_one = hidden.shape[:-1] == self._labels.shape and hidden.dtype == weight.dtype
        if self.calls > 1 or not is_one or isinstance(weight, DTensor):
            return nn.functional.linear(hidden, weight)
        summed = linear_cross_entropy(hidden, weight, self._labels)
        with torch.inference_mode(False):  # inference tensors do not track in-place changes
            # As wide as logits: a model may set the logits of some tokens. Not a view: FSDP2 warns about views.
            self.loss = nn.functional.pad(summed.reshape(1, 1, 1), (0, len(weight) - 1))
        self._version = self.loss._version
        return self.loss

    def is_result(self, found: Tensor) -> bool:
        """Return whether the model's result is the loss, unchanged."""
        return self.calls == 1 and found is self.loss and found._version == self._version


def loss_or_logits(model: nn.Module, labels: Tensor, call: Callable[[], Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the sum of the losses of local tokens and None, or None and the logits that the model returned.

    Both are None if the model changed the loss as if it were logits. Then call it again without this function.

    Args:
        model: As in `Part.loss`, wrapped or not.
        labels: `[batch, local_tokens]`, as in `linear_cross_entropy`.
        call: Calls the model and returns its logits.
    """
    head = _plain_head(model)
    if head is None:
        return None, call()
    own = _LossHead(head, labels)
    head.forward = own  # type: ignore[method-assign, assignment]
    try:
        found = call()
    finally:
        del head.forward
    if own.is_result(found):
        return found[0, 0, 0], None
    return None, found if own.loss is None else None


def _plain_head(model: nn.Module) -> nn.Linear | None:
    """Return the head of a causal LM if it is a plain linear layer and no compiled graph contains it, else None."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []  # other values are refused by the call
    outermost = next((module for module in modules if isinstance(module, PreTrainedModel)), None)
    try:
        head: Any = None if outermost is None else outermost.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    # FSDP2 replaces a module's class by a subclass, which inherits forward.
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return None
    compiled = filter(_is_compiled, modules)
    return None if head.bias is not None or any(_contains(module, head) for module in compiled) else head


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules  # compile() in place, or around it


def _contains(module: nn.Module, head: nn.Module) -> bool:
    return any(each is head for each in module.modules())
