"""Splits sequences over ranks: layouts, shards and whole tensors, packed trees."""

from bmburst.sequence.parts import Ids
from bmburst.sequence.shards import SequenceShard, ShardedBatch, gathered, shard, unshard
from bmburst_ops import IGNORE_INDEX

__all__ = ["IGNORE_INDEX", "Ids", "SequenceShard", "ShardedBatch", "gathered", "shard", "unshard"]
