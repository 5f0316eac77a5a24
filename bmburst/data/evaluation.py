"""Text in a fixed order, every token of it once, to measure a model on."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bmburst.data.batches import local_batch_size
from bmburst.data.packing import PackedSequences
from bmburst.errors import UserError
from bmburst_ops.constants import IGNORE_INDEX


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationBatch:
    """One rank's part of a step of evaluation.

    Attributes:
        inputs: int64 `[batch_size / data_parallel, sequence_length]`; the end-of-document id where there is no text.
        labels: The same shape; `IGNORE_INDEX` where there is no text.
        label_count: Labels that count, over all data ranks.
        text_bytes: Bytes of text that they stand for, over all data ranks.
        documents: Inputs of each document of each row, padding left out, or None where the sequences are streams. A row
            without text has one of a single token.
    """

    inputs: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    label_count: int
    text_bytes: int
    documents: tuple[tuple[int, ...], ...] | None = None


def evaluation_batches(
    sequences: PackedSequences,
    *,
    batch_size: int = 1,
    limit: int | None = None,
    data_rank: int = 0,
    data_parallel: int = 1,
) -> Iterator[EvaluationBatch]:
    """Return an iterator over the samples in order, the partial one, padded, at the end.

    Every data rank gets the same number of batches of the same shape; rows beyond the last sample are all padding.

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

    def step(first: int) -> EvaluationBatch:
        taken = range(first, min(first + batch_size, count))
        inputs = np.full((local, sequences.sequence_length), sequences.token_file.eos_id, np.int64)
        labels = np.full((local, sequences.sequence_length), IGNORE_INDEX, np.int64)
        mine = taken[data_rank * local : (data_rank + 1) * local]
        for row, index in enumerate(mine):
            ids = sequences[index]
            inputs[row, : len(ids) - 1] = ids[:-1]
            labels[row, : len(ids) - 1] = ids[1:]
        return EvaluationBatch(
            inputs=inputs,
            labels=labels,
            label_count=min(taken.stop * sequences.sequence_length, sequences.label_count)
            - first * sequences.sequence_length,
            text_bytes=sum(map(sequences.text_bytes, taken)),
            documents=_documents(sequences, mine, local),
        )

    return map(step, range(0, count, batch_size))


def _documents(sequences: PackedSequences, taken: range, rows: int) -> tuple[tuple[int, ...], ...] | None:
    """See `EvaluationBatch.documents`; rows beyond the samples taken are all padding."""
    if sequences.pack == "stream":
        return None
    return tuple(sequences.documents(index) or () for index in taken) + ((1,),) * (rows - len(taken))
