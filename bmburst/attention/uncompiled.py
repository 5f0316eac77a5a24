"""Attention for compiled callers: torch's compiler ends its graph before it and goes on after it.

Importing this file takes the seconds that torch's compiler takes to import.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bmburst.attention.api import attend as _attend
from bmburst.attention.biased import attend as _attend_biased

attend: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(_attend)

attend_biased: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(_attend_biased)
"""`biased_attention`: the same with a learned bias."""
