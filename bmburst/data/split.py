"""The held-out part: which tokens of a corpus are never trained on."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bmburst.data.token_file import TokenFile
from bmburst.errors import UserError

Spans = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Ranges of tokens, int64 `[ranges, 2]` of (start, stop), in order and disjoint; together they are the corpus."""

    train: Spans
    held_out: Spans


def split_documents(file: TokenFile, held_out_fraction: float) -> Split:
    """Hold out a part of the documents, chosen by a hash of their text.

    Documents come in the order of their keys, those of equal text together, and whole ones are held out until no
    further one fits into the asked number of tokens. Where that is not half of it (a corpus of one file, or of a few
    large ones), the end of the next document is held out too. So the part has between half the asked tokens and all
    of them, depends on the texts alone (not on file names, seeds or lengths), and equal documents fare alike.

    Args:
        file: The corpus.
        held_out_fraction: The share of the corpus's tokens, in (0, 1).

    Raises:
        UserError: The fraction is not in (0, 1), or there are too few tokens to share out.
    """
    if not 0 < held_out_fraction < 1:
        raise UserError(f"held_out_fraction must lie between 0 and 1, got {held_out_fraction}\nusual: 0.01 to 0.1")
    total = file.token_count
    if total < 4:
        raise UserError(
            f"data {file.path}: has {total} tokens, too few to hold any out\n"
            f"fix: more text (it has {file.text_bytes} bytes)"
        )
    target = max(1, int(total * held_out_fraction))
    starts, ends = np.asarray(file.document_offsets[:-1]), np.asarray(file.document_offsets[1:])
    held_from = ends.copy()  # document d holds out its tokens [held_from[d], ends[d])

    order = np.argsort(file.document_keys, kind="stable")
    keys = np.asarray(file.document_keys)[order]
    groups = np.append(np.flatnonzero(np.diff(keys, prepend=~keys[:1])), len(order))  # where each text begins, in order
    in_order = np.append(0, np.cumsum((ends - starts)[order]))  # tokens of the documents before, in order
    whole = int(np.searchsorted(in_order[groups], target, side="right")) - 1  # texts that fit as a whole
    held_from[order[: groups[whole]]] = starts[order[: groups[whole]]]
    held = int(in_order[groups[whole]])
    if 2 * held < target:
        copies = order[groups[whole] : groups[whole + 1]]
        held_from[copies] -= max((target - held) // len(copies), 1)  # less than the document, which does not fit
    return Split(train=_joined(starts, held_from), held_out=_joined(held_from, ends))


def _joined(starts: Spans, stops: Spans) -> Spans:
    """Return the ranges that are not empty, neighbours made one."""
    kept = starts < stops
    starts, stops = starts[kept], stops[kept]
    first = np.append(True, starts[1:] != stops[:-1])
    return np.stack([starts[first], stops[np.append(first[1:], True)]], axis=1)
