"""Splits sequences over ranks and joins them: `shard`, `unshard`, and `SequenceShard` for batches."""

from bmburst.sequence.shards import Ids, SequenceShard, ShardedBatch, shard, unshard
from bmburst_ops import IGNORE_INDEX

__all__ = ["IGNORE_INDEX", "Ids", "SequenceShard", "ShardedBatch", "shard", "unshard"]
