"""What training and evaluation do alike: whole sequences, packed documents or not, to this rank's token losses."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from bmburst.mask import Documents
from bmburst.sequence import SequenceShard

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama


def token_losses(
    model: "Llama",
    cut: SequenceShard,
    inputs: Tensor,
    labels: Tensor,
    documents: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Return the sum of the token losses of this rank's part of whole sequences, in nats.

    Args:
        model: On all ranks.
        cut: This rank's part of a sequence.
        inputs: `[batch, tokens]` int64.
        labels: The token after each, in the same shape; `IGNORE_INDEX` where there is no loss.
        documents: Tokens of each document of each sequence; what lies behind them is padding, which attention skips.
            A token sees only its own document, in which positions count from 0. None: a sequence is one text.

    Raises:
        UserError: The documents do not fit the sequences, or layout "balanced" gets several sequences with documents.
    """
    if documents is None:
        part = cut.batch(inputs, labels)
        return model.loss(part.tokens, part.positions, part.labels, cut.length)
    masks = tuple(Documents(tuple(lengths)) for lengths in documents)
    mask = masks[0] if len(masks) == 1 else masks
    part = cut.under(mask).batch(inputs, labels, mask)
    return model.loss(part.tokens, part.positions, part.labels, None, mask)  # the masks know how many are real
