"""Who sees whom under the suite's masks, pair by pair."""

import torch
from torch import Tensor

from benchmarks.attention.cells import sample_document_lengths, window_tokens


def visible(mask: str, tokens: int) -> Tensor:
    """Return which keys each query sees, `[tokens, tokens]`."""
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    if mask == "full":
        return torch.ones(tokens, tokens, dtype=torch.bool)
    seen = key <= query
    if mask == "documents":
        number = torch.repeat_interleave(torch.tensor(sample_document_lengths(tokens)))
        seen &= number[query] == number[key]
    if mask == "window":
        seen &= key > query - window_tokens(tokens)
    return seen
