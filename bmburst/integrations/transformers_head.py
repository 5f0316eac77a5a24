"""Makes a causal LM of transformers return its loss in the place of logits, which a long sequence does not fit with.

65,536 tokens of a 128,256-word vocabulary are 15.7 GiB of logits in bfloat16, and their gradient is as much again.
While the model is called, the forward function of its head computes head and loss in one, a chunk of tokens at a time
(`bmburst_ops.linear_cross_entropy`), and returns the sum as the first of the logits of one token, `[1, 1, vocabulary]`.
So all that wraps the model stays in effect: FSDP2 gathers the head's weight and sees the output that backward begins
with.

A model that changes its logits behind the head (softcaps, scales, words that it forbids) would change the loss. Then
what it returns is not what the head has returned.
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
        with torch.inference_mode(False):  # tensors of inference mode do not count their changes
            # As wide as logits are: a model may set those of some words. Not a view: FSDP2 warns of views.
            self.loss = nn.functional.pad(summed.reshape(1, 1, 1), (0, len(weight) - 1))
        self._version = self.loss._version
        return self.loss

    def is_result(self, found: Tensor) -> bool:
        """Whether what the model returned is the loss, and nothing has changed it."""
        return self.calls == 1 and found is self.loss and found._version == self._version


def loss_or_logits(model: nn.Module, labels: Tensor, call: Callable[[], Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the sum of the losses of local tokens and None, or None and the logits that the model returned.

    Both are None where a model has changed the loss as if it were logits: it must be called again, without this.

    Args:
        model: As `Part.loss` takes it, wrapped or not.
        labels: `[batch, local_tokens]`, as `linear_cross_entropy` takes them.
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
    """Return the head of a causal LM if it is a product with a matrix and nothing else, and no graph contains it."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []  # what is none the call refuses
    outermost = next((module for module in modules if isinstance(module, PreTrainedModel)), None)
    try:
        head: Any = None if outermost is None else outermost.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    # FSDP2 makes a class of its own of a module's, which has its forward.
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return None
    compiled = filter(_is_compiled, modules)
    return None if head.bias is not None or any(_contains(module, head) for module in compiled) else head


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules  # compile() in place, or around it


def _contains(module: nn.Module, head: nn.Module) -> bool:
    return any(each is head for each in module.modules())
