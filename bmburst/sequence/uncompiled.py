"""Cutting and joining sequences for compiled callers: torch's compiler ends its graph before it and goes on after it.

Importing this file takes the seconds that torch's compiler takes to import.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bmburst.sequence.shards import shard as _shard
from bmburst.sequence.shards import unshard as _unshard

shard: Callable[..., Tensor] = torch.compiler.disable(_shard)
unshard: Callable[..., Tensor] = torch.compiler.disable(_unshard)
