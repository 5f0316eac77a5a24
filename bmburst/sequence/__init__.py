"""Splits sequences over ranks: layouts, shards and whole tensors, packed trees."""

from bmburst.sequence.shards import (
    IGNORE_INDEX,
    Ids,
    SequenceShard,
    ShardedBatch,
    gathered,
    shard,
    unshard,
)

__all__ = [
    "IGNORE_INDEX",
    "Ids",
    "SequenceShard",
    "ShardedBatch",
    "gathered",
    "shard",
    "unshard",
]
