"""Moves the tokens of a split sequence from one layout to another, with one all-to-all."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmburst.comm.checks import CheckedCommunicator
from bmburst.schedule.layout import Layout


@dataclass(frozen=True, slots=True)
class Relayout:
    """How this rank's tokens change from one layout to another.

    Attributes:
        comm: The ranks of the sequence.
        send: Local token for each place of the buffer that is sent, `[ranks, most]`, flat.
        receive: Place in the received buffer of each new local token, `[local_tokens]`.
    """

    comm: CheckedCommunicator
    send: Tensor
    receive: Tensor

    @classmethod
    def between(cls, source: Layout, target: Layout, comm: CheckedCommunicator) -> "Relayout":
        """Return the change from `source` to `target`, two layouts of equally many ranks and tokens."""
        before, after = _positions(source), _positions(target)
        owner = np.empty(before.size, np.int64)
        owner[after] = np.arange(source.size)[:, None]
        to = owner[before]  # [ranks, local_tokens]: the new rank of each token
        most = max(int(np.bincount(row, minlength=source.size).max()) for row in to)
        send = np.zeros((source.size, most), np.int64)
        place = np.empty(before.size, np.int64)  # of each token in the buffer that its new rank gets
        for rank, row in enumerate(to):
            for other in range(source.size):
                local = np.flatnonzero(row == other)
                place[before[rank, local]] = rank * most + np.arange(len(local))
                if rank == comm.rank:
                    send[other, : len(local)] = local
        tensors = (torch.from_numpy(each).to(comm.device) for each in (send.ravel(), place[after[comm.rank]]))
        return cls(comm, *tensors)

    def move(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of the new layout, for those of the old one in dimension `dim`."""
        rows = x.movedim(dim, 0)[self.send]
        (found,) = self.comm.all_to_all(rows.unflatten(0, (self.comm.size, -1)).contiguous()).wait()
        return found.flatten(0, 1)[self.receive].movedim(0, dim)


def _positions(layout: Layout) -> Any:
    """Return the global positions of the tokens of each rank, `[ranks, local_tokens]`."""
    ranks = (layout.runs(rank) for rank in range(layout.size))
    return np.stack([np.concatenate([r.start + r.stride * np.arange(r.tokens) for r in runs]) for runs in ranks])
