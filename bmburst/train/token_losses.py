"""What training and evaluation do alike: this rank's part of sequences, packed or not, to its token losses."""

from typing import TYPE_CHECKING

from torch import Tensor

from bmburst.train.local_batch import LocalBatch

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama


def token_losses(model: "Llama", batch: LocalBatch) -> Tensor:
    """Return the sum of the token losses of this rank's part of sequences, in nats.

    Args:
        model: On all ranks.
        batch: Of this rank, on its device; every rank has its part of the same sequences.

    Raises:
        UserError: Layout "balanced" gets several sequences with documents.
    """
    tokens, labels, positions = batch.ids
    if batch.masks is None:
        return model.loss(tokens, positions, labels, batch.length)
    mask = batch.masks[0] if len(batch.masks) == 1 else batch.masks
    return model.loss(tokens, positions, labels, None, mask)  # the masks know how many are real
