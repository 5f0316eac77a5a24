"""Computes losses and log-probabilities in the head of a model of transformers, a chunk of tokens at a time.

The logits of a long sequence do not fit in memory: those of 65,536 tokens with a vocabulary of 128,256 take 15.7 GiB in
bfloat16, and their gradient takes the same again. During a call of the model, the forward function of its head is
replaced. It computes head and result in one (`bmburst_ops.linear_cross_entropy`, `bmburst_ops.linear_logprobs`), and
returns the result as the logits of as few tokens as can hold it, `[1, tokens, vocabulary]`: of one token for a loss. So
wrappers of the model keep working: FSDP2 gathers the head's weight, and sees the output where backward begins.

A model that changes its logits after the head (softcap, scale, forbidden tokens) would change the result. This is
detected: the model then returns something other than the result of the head, be it in another dtype.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bmburst.attention.options import gradient_signature
from bmburst.comm.checks import CheckedCommunicator, describe_tensors
from bmburst.errors import UserError
from bmburst.integrations.transformers_modules import Modules, outermost
from bmburst.sequence import gathered
from bmburst.sequence.parts import dimension_of
from bmburst_ops import IGNORE_INDEX
from bmburst_ops.autocast import as_autocast_casts
from bmburst_ops.errors import first_order
from bmburst_ops.linear_cross_entropy import num_chunks
from bmburst_ops.linear_logprobs import linear_logprobs, logprobs

CHUNK = 4096
"""Number of tokens whose fp32 logits exist at once, where a model has computed all logits."""

_CAST = "ToCopyBackward0"
"""The node of a change of dtype in autograd's graph."""
_CASTS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes through which an output may have gone."""

_MARK = 1024.0
"""A value behind the results, which a scale or a softcap of logits changes; 0 would stay 0. Every dtype represents it.
"""

OfHead = Callable[[Tensor, Tensor], Tensor]
"""Returns a tensor of one dimension for hidden states `[batch, local_tokens, features]` and the head's weight."""


def require_temperature(temperature: object) -> float:
    """Return a temperature of log-probabilities; UserError if it is no finite number above 0."""
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise UserError(f"temperature is {temperature!r}\nallowed: a number above 0\nfix: temperature=1.0")
    return float(temperature)


def label_logps(labels: Tensor, temperature: float = 1.0, *, entropy: bool = False) -> OfHead:
    """Return what computes the log-probability of each label in the head, for `computed_in_head`.

    Args:
        labels: `[batch, local_tokens]`, `IGNORE_INDEX` where there is none.
        temperature: Divides the logits.
        entropy: Whether to compute entropies too.

    Returns:
        A function that returns log-probabilities of the labels that count, in nats, in fp32 or wider; behind them the
        entropies of their distributions, if they are asked for.
    """
    has_label = (labels != IGNORE_INDEX).nonzero(as_tuple=True)
    counting = labels[has_label]

    def compute(hidden: Tensor, weight: Tensor) -> Tensor:
        return _joined(linear_logprobs(hidden[has_label], weight, counting, temperature=temperature, entropy=entropy))

    return compute


def label_logps_of(logits: Tensor, labels: Tensor, temperature: float = 1.0, *, entropy: bool = False) -> Tensor:
    """Return what `label_logps` computes; fp32 logits exist only for a chunk of tokens at a time.

    Args:
        logits: `[batch, local_tokens, vocabulary]`.
        labels: As in `label_logps`.
        temperature: As in `label_logps`.
        entropy: As in `label_logps`.
    """
    has_label = (labels != IGNORE_INDEX).nonzero(as_tuple=True)
    parts = [
        checkpoint(_of_chunk, *pair, temperature, entropy, use_reentrant=False)
        for pair in zip(logits[has_label].split(CHUNK), labels[has_label].split(CHUNK), strict=True)
    ]
    return torch.cat(parts, 1).flatten()


def _of_chunk(logits: Tensor, labels: Tensor, temperature: float, entropy: bool) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return _joined(logprobs(wide, labels, entropy=entropy)).view(1 + entropy, len(labels))


def _joined(values: tuple[Tensor, Tensor | None]) -> Tensor:
    logps, entropies = values
    return logps if entropies is None else torch.cat((logps, entropies))


def computed_in_head(
    model: nn.Module, shape: torch.Size, compute: OfHead, call: Callable[[], Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Return what `compute` returns in the head of the model and None, or None and the logits that the model returned.

    Both are None if the model changed the result as if it were logits. Then call it again without this function.

    Args:
        model: As in `Part.loss`, wrapped or not.
        shape: Batch and local tokens.
        compute: Computes the result, for example `label_logps(labels)`.
        call: Calls the model and returns its logits.
    """
    head = _plain_head(model)
    if head is None:
        return None, call()
    own = _Head(head, shape, compute)
    head.forward = own  # type: ignore[method-assign, assignment]
    # With find_unused_parameters, which is the default of transformers' Trainer, DDP returns copies of tensors.
    inside = model.module if isinstance(model, DistributedDataParallel) else None
    returned: list[Any] = []
    hook = inside and inside.register_forward_hook(lambda _, __, output: returned.append(output))
    try:
        found = call()
    finally:
        del head.forward
        if hook is not None:
            hook.remove()
    if own.is_result(getattr(returned[-1], "logits", None) if returned else found):
        assert own.result is not None
        return _Values.apply(found, own.result).flatten()[: own.numbers], None  # type: ignore[no-untyped-call]
    return None, found if own.result is None else None


class _Head:
    """The forward function of a head for one call of the model."""

    def __init__(self, head: nn.Linear, shape: torch.Size, compute: OfHead) -> None:
        self._head, self._shape, self._compute = head, shape, compute
        self.result: Tensor | None = None
        self.numbers = 0
        self.calls = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        hidden, weight = as_autocast_casts((hidden, self._head.weight))
        is_one = hidden.shape[:-1] == self._shape and hidden.dtype == weight.dtype
        if self.calls > 1 or not is_one or isinstance(weight, DTensor):
            return nn.functional.linear(hidden, weight)
        found = self._compute(hidden, weight)
        self.numbers, vocabulary = len(found), len(weight)
        # One mark at least: the results of a rank without a label are zeros or none, and ranks must notice alike.
        rows = num_chunks(self.numbers + 1, vocabulary)
        with torch.inference_mode(False):  # inference tensors do not track in-place changes
            # As wide as logits: a model may set the logits of some tokens.
            filled = nn.functional.pad(found, (0, rows * vocabulary - self.numbers), value=_MARK)
            self.result = filled.reshape(1, rows, vocabulary).clone()  # not a view: FSDP2 warns about views
        self._version = self.result._version
        return self.result

    def is_result(self, found: Tensor | None) -> bool:
        """Return whether the model's result is that of the head, unchanged but for its dtype.

        FSDP2 casts the output to the `output_dtype` of its policy, which accelerate sets. Without gradients, the host
        waits where the dtype has changed.
        """
        result = self.result
        if self.calls != 1 or found is None or result is None or result._version != self._version:
            return False
        if found is result:
            return True
        if result.grad_fn is None:
            casts = (result.to(low).to(found.dtype) for low in (found.dtype, *_CASTS))
            return any(torch.allclose(found, cast, rtol=0, atol=0, equal_nan=True) for cast in casts)
        node = found.grad_fn
        while node is not None and node.name() == _CAST:
            node = node.next_functions[0][0]
        return node is result.grad_fn


class _Values(torch.autograd.Function):
    """The result of the head, where backward begins at the model's output, whose dtype may hold fewer digits."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, result: Tensor) -> Tensor:
        ctx.dtype = output.dtype
        return result.clone()

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(grad, dtype=ctx.dtype), grad


def _plain_head(model: nn.Module) -> nn.Linear | None:
    """Return the head of a causal LM if it is a plain linear layer and no compiled graph contains it, else None."""
    modules = Modules(model).every  # none of another value, which the call refuses
    whole = outermost(model)
    try:
        head = None if whole is None else whole.get_output_embeddings()
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


class Gathered(torch.autograd.Function):
    """The whole tensor of a `Part` on every rank; see `Part.gathered`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Any) -> Tensor:
        """Gather the local tokens of all ranks."""
        ctx.cut = part.cut
        return gathered(x, 1, part.cut, part.mesh.sequence)

    @staticmethod
    @first_order(UserError)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Take this rank's part of the gradient."""
        return ctx.cut.take(grad), None


def decided_tokens(part: Any, call: str, x: Tensor, dim: int) -> int:
    """Return the dimension of a tensor that holds a rank's tokens, once all ranks of the sequence agree on the call.

    Args:
        part: The `Part`.
        call: The name of its method.
        x: The tensor.
        dim: The dimension, from the end if it is below 0.

    Raises:
        UserError: It holds another number of tokens, or the ranks disagree.
    """

    def decide() -> tuple[int, str]:
        along, tokens = dimension_of(x, dim), part.cut.local_tokens
        if x.shape[along] != tokens:
            raise UserError(
                f"dimension {along} of a tensor of shape {list(x.shape)} does not hold a rank's tokens\n"
                f"allowed: {tokens} of them\nfix: give dim=, the dimension of the tokens"
            )
        return along, f"Part.{call}\n{describe_tensors(x)}\ndim={along}\n{gradient_signature(x)}"

    comm: CheckedCommunicator = part.mesh.sequence
    with comm.first_calls(f"Part.{call}"):
        return comm.decided(decide)
