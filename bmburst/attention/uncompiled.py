"""Attention for compiled callers: torch's compiler ends its graph before it and goes on after it.

Importing this file takes the seconds that torch's compiler takes to import.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bmburst.attention.api import attend as _attend

attend: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(_attend)
