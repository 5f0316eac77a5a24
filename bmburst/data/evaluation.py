"""Text in a fixed order, every token of it once, to measure a model on."""

from collections.abc import Iterator

from bmburst.data.batches import local_batch_size
from bmburst.data.packing import PackedSequences
from bmburst.data.samples import Samples
from bmburst.errors import UserError


def evaluation_batches(
    sequences: PackedSequences,
    *,
    batch_size: int = 1,
    limit: int | None = None,
    data_rank: int = 0,
    data_parallel: int = 1,
) -> Iterator[Samples]:
    """Return an iterator over the samples in order, the partial one, padded, at the end.

    Every data rank gets the same number of batches of as many rows; rows beyond the last sample are without text.

    Args:
        sequences: Usually the "held_out" part of a corpus, or "all" of a file.
        batch_size: Sequences a step, over all data ranks.
        limit: Stop after that many sequences; None takes all.
        data_rank: This rank's data group, in [0, data_parallel).
        data_parallel: How many data groups there are.

    Raises:
        UserError: `batch_size` is not a positive multiple of `data_parallel`, or `limit` is less than 1.
    """
    local = local_batch_size(batch_size, data_rank, data_parallel)
    if limit is not None and limit < 1:
        raise UserError(f"the limit of evaluation must be at least 1 sequence, got {limit}")
    count = len(sequences) + (sequences.partial_labels > 0)
    count = count if limit is None else min(count, limit)

    def step(first: int) -> Samples:
        taken = tuple(range(first, min(first + batch_size, count)))
        mine = taken[data_rank * local : (data_rank + 1) * local]
        return Samples(sequences, taken, mine + (None,) * (local - len(mine)))

    return map(step, range(0, count, batch_size))
