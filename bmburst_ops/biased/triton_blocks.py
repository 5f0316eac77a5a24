"""Scores of a block of queries and a block of keys with their bias, for each kind of block. Needs Triton.

KIND is a word: "common" (all see each other, one bias), "near" (all do, and distance decides) or "general".
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from bmburst_ops.biased.triton_formula import bias_of, bucket_of, load_positions, load_tokens, near_bias, sees
from bmburst_ops.biased.triton_runs import GENERAL, NEAR


@triton.jit
def stop_of(start, stop, kind, KIND: tl.constexpr):
    """Return where a loop over a run of blocks ends: at its start if they are of another kind."""
    if KIND == "common":
        is_it = kind >= 0
    elif KIND == "near":
        is_it = kind == NEAR
    else:
        is_it = kind == GENERAL
    return tl.where(is_it, stop, start)


@triton.jit
def common_bias(table_row, kind):
    """Return the bias of a run of blocks, 0 where they have none in common."""
    return tl.load(table_row + kind, mask=kind >= 0, other=0.0)


@triton.jit
def load_others(vectors, batch, first, batches, length, ROWS: tl.constexpr, KIND: tl.constexpr):
    """Return what a kind of block asks of tokens `first` to `first + ROWS`: positions, or all integers."""
    if KIND == "general":
        found = load_tokens(vectors, batch, first, batches, length, ROWS)
    else:
        position = load_positions(vectors, batch, first, length, ROWS)
        found = (position, position, position, position, position, position)
    return found


@triton.jit
def with_bias(
    scores, of_queries, of_keys, common, table_row, lookup, KIND: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Return scores with their bias, -inf where a query does not see a key.

    Args:
        scores: Of a block, either way round, in units of log 2.
        of_queries: Their integers, as rows or columns; positions are enough if KIND is not "general".
        of_keys: Theirs, the other way.
        common: The bias of "common".
        table_row: The head's biases, `table_row_of`.
        lookup: How they are looked up, `lookup_of`.
    """
    if KIND == "common":
        scores += common
    elif KIND == "near":
        scores += near_bias(table_row, of_queries[0], of_keys[0], lookup, PRECISION)
    else:
        visible = sees(of_queries, of_keys)
        bucket = bucket_of(of_queries, of_keys, visible, lookup, PRECISION)
        scores = tl.where(visible, scores + bias_of(table_row, bucket, lookup[5], PRECISION), float("-inf"))
    return scores
