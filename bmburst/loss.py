"""The training loss of a sequence split over ranks: the mean over all tokens of all ranks.

Each rank sums the losses of its own tokens. BMTrain averages the gradients of W ranks (`OptimManager.scale_loss`
multiplies the loss by 1 / zero_size; ZeRO's reduce-scatter sums), so it minimizes (1 / W) sum_r L_r. Let s_r be the
loss sum of rank r and N the number of valid labels on all ranks. The objective is sum_r s_r / N, and L_r = s_r W / N
gives it for every split into data and sequence ranks. The mean over a rank's own labels would not: ranks hold different
numbers of labels, and a rank with only padding would divide by 0.
"""

from torch import Tensor

from bmburst.comm.groups import bmtrain_groups, bmtrain_pipe_degree
from bmburst.errors import UserError
from bmburst_ops import IGNORE_INDEX
from bmburst_ops.linear_cross_entropy import DEFAULT_CHUNK, linear_cross_entropy, num_chunks, token_cross_entropy

__all__ = [
    "DEFAULT_CHUNK",
    "IGNORE_INDEX",
    "count_valid",
    "global_mean",
    "num_chunks",
    "require_ids",
    "token_logprobs",
    "token_loss_sum",
]


def count_valid(labels: Tensor) -> Tensor:
    """Return the number of labels that are not `IGNORE_INDEX`: a scalar int64 tensor, to be summed over the world."""
    return (labels != IGNORE_INDEX).sum()


def global_mean(loss_sum: Tensor, num_valid_world: int | Tensor, world_size: int) -> Tensor:
    """Return the loss that a rank passes to `OptimManager.backward`.

    Args:
        loss_sum: Sum of this rank's token losses, a scalar, in nats.
        num_valid_world: Number of valid labels on all ranks, in all micro-batches of the step. If it is 0, the result
            and the gradients are 0.
        world_size: Number of ranks that BMTrain averages over: all ranks, or those of a stage if BMTrain was started
            with stages (`pipe_size`).

    Returns:
        `loss_sum * world_size / num_valid_world`. Its mean over ranks is the mean loss of a token, in nats.

    Raises:
        UserError: BMTrain has stages, and `world_size` is the number of ranks of all of them.
    """
    if (stages := bmtrain_pipe_degree()) > 1 and world_size == bmtrain_groups()[0].size:
        raise UserError(
            f"global_mean over {world_size} ranks in a pipeline of {stages} stages: BMTrain divides the gradient by "
            f"the {world_size // stages} ranks of a stage, so it would be {stages} times too large\n"
            "fix: global_mean(loss_sum, valid, bmt.world_size() // bmt.config['pipe_size'])"
        )
    if isinstance(num_valid_world, Tensor):
        # In fp64: 16 bits would round the number of labels, and in fp16 it may be infinite.
        return (loss_sum.double() * world_size / num_valid_world.clamp(min=1)).to(loss_sum.dtype)
    return loss_sum * (world_size / max(num_valid_world, 1))


def token_loss_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int = DEFAULT_CHUNK,
    check: bool | None = None,
    per_token: bool = False,
) -> Tensor:
    """Return the sum of this rank's token losses in nats, with the logits computed in chunks of tokens.

    Args:
        hidden: `[batch, tokens, features]`, the output of the model's final norm.
        weight: `[vocabulary, features]`, the head. Read a BMTrain parameter once: each read gathers it.
        labels: `[batch, tokens]` int64, already shifted; `IGNORE_INDEX` where there is no loss.
        chunk: Tokens whose logits are computed at once. The number of chunks depends only on the number of tokens,
            which is the same on all ranks.
        check: Whether to check the range of labels; by default only on a CPU, where it is cheap.
        per_token: Whether to return the loss of each token instead of the sum. Backward then recomputes the logits.

    Returns:
        A scalar in fp32 or wider; exactly 0, with zero gradients, on a rank without a valid label. With `per_token`
        `[batch, tokens]`; 0 where there is no loss.

    Raises:
        UserError: A label is neither `IGNORE_INDEX` nor a row of the head.
    """
    if not labels.is_cuda if check is None else check:
        require_ids("label", labels, len(weight), ignored=IGNORE_INDEX)
    return (token_cross_entropy if per_token else linear_cross_entropy)(hidden, weight, labels, chunk=chunk)


def token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int = DEFAULT_CHUNK, check: bool | None = None
) -> Tensor:
    """Return the log-probability of each given token, with the logits computed in chunks of tokens.

    This is `log_softmax(hidden @ weight.T).gather(labels)` without the tensor of all logits, for losses that weight
    each token, such as those of DPO, PPO and GRPO. Backward recomputes the logits of each chunk. Beside inputs and
    gradients, both passes hold the logits of one chunk; backward on a GPU also holds those of `GATHERED_CHUNKS` chunks
    in 16 bits.

    Args:
        hidden: `[..., features]`, the output of the model's final norm, in any floating dtype.
        weight: `[vocabulary, features]` in the same dtype, the head. Read a BMTrain parameter once: each read gathers
            it.
        labels: `[...]` int64: the token of each position whose log-probability is returned; for a language model the
            next token. `IGNORE_INDEX` where there is none.
        chunk: Tokens whose logits are computed at once.
        check: Whether to check the range of labels; by default only on a CPU, where it is cheap.

    Returns:
        `[...]` in nats, in fp32 or in the inputs' dtype if that is wider; exactly 0, without a gradient, where the
        label is `IGNORE_INDEX`. Differentiable once with respect to `hidden` and `weight`.

    Raises:
        UserError: A label is neither `IGNORE_INDEX` nor a row of the head.
        ValueError: Shapes or dtypes do not fit, or `chunk` is not positive.
    """
    return 0 - token_loss_sum(hidden, weight, labels, chunk=chunk, check=check, per_token=True)


def require_ids(kind: str, ids: Tensor, vocab_size: int, *, ignored: int | None = None) -> None:
    """Check that ids are in the vocabulary. The host waits for the device.

    Args:
        kind: Name of the ids, for the message.
        ids: int64, any shape.
        vocab_size: Ids are in [0, vocab_size).
        ignored: Another id that is allowed.

    Raises:
        UserError: An id is out of range.
    """
    wrong = (ids < 0) | (ids >= vocab_size)
    if ignored is not None:
        wrong &= ids != ignored
    if bool(wrong.any()):
        besides = "" if ignored is None else f" or {ignored} (no loss)"
        allowed = f"0 to {vocab_size - 1}" if vocab_size else "none, as the vocabulary is empty"
        raise UserError(
            f"{kind} {int(ids[wrong][0])} is out of range\nallowed: {allowed}{besides}\n"
            "fix: use the tokenizer that the model was made for, or a model with a larger vocab_size"
        )
