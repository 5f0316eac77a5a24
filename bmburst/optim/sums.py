"""Sums of gradients between ZeRO groups: `GradientSums`."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import bmtrain as bmt
import torch

from bmburst.blocks.sharded import ShardedBlock
from bmburst.comm.collectives import FlatStorage, launched_together
from bmburst.zero import gradient_of, named_shards
from bmburst.zero_group import ZeroGroups


class GradientSums:
    """Sums each rank's shards of the gradient with those of the ranks that hold copies, once a step.

    Shards of blocks are summed while the backward pass of the last micro-batch goes on, on a stream of their own; those
    of other parameters after it. All groups get equal bits, so their weights stay equal.

    Without groups it sums nothing. The tied table of a pipeline, whose two stages have the complete gradient after a
    step, is treated as theirs are if `backward` is called again.

    Args:
        model: A model whose blocks are `ShardedBlock`, created in `groups.sharding()`.
        groups: The ZeRO groups.
    """

    def __init__(self, model: torch.nn.Module, groups: ZeroGroups) -> None:
        self.groups, self._between = groups, groups.between
        self._is_last = self._is_complete = False
        self._blocks = [each for each in model.modules() if isinstance(each, ShardedBlock)]
        trained = (each for each in named_shards(model) if each.storage.requires_grad)
        self._storages = {id(each.storage): each for each in trained}  # with one of the parameters in each
        self._summed: set[int] = set()
        if self._between is None:
            return
        self._stream: Any = torch.cuda.Stream(priority=-1)
        for block in self._blocks:
            block.after_scatter = self._after_scatter

    @contextmanager
    def backward(self, *, is_last: bool) -> Iterator[None]:
        """Do the backward pass of a micro-batch, or those of a pipeline's step, inside the `with` block.

        Args:
            is_last: Whether it is the last of a step. Afterwards gradients are complete, also those in host memory.
        """
        if self._is_complete:
            self._keep_one()
        self._is_last, self._summed = is_last, set()
        yield
        if is_last and self._between is not None:
            rest = [each.storage for key, each in self._storages.items() if key not in self._summed]
            self._stream.wait_stream(torch.cuda.current_stream())
            self._sum(rest)
            torch.cuda.current_stream().wait_stream(self._stream)
        self._is_last, self._is_complete = False, is_last

    def clear(self) -> None:
        """Clear the gradients of the blocks. The caller clears those of other parameters."""
        self._is_complete = False
        for block in self._blocks:
            block.put_gradient_aside()

    def _keep_one(self) -> None:
        """Clear complete gradients, to which further ones will be added, on all ranks but the first that hold them."""
        for shard in self._storages.values():
            if shard.is_copy and (gradient := gradient_of(shard)) is not None:
                gradient.zero_()

    def _after_scatter(self, storages: Collection[torch.nn.Parameter]) -> Any:
        """See `bmburst.blocks.sharded.AfterScatter`."""
        if not self._is_last:
            return bmt.config["load_stream"]
        self._sum(storages)
        return self._stream

    def _sum(self, storages: Collection[torch.nn.Parameter]) -> None:
        # Pieces of one place have one size in all groups, so all ranks of `_between` make the same calls.
        gradients = [each.grad for each in storages if each.grad is not None and each.grad.numel()]
        self._stream.wait_stream(bmt.config["load_stream"])
        with torch.cuda.stream(self._stream), launched_together():
            for gradient in gradients:
                bmt.nccl.allReduce(FlatStorage(gradient), FlatStorage(gradient), "sum", self._between)
        self._summed.update(map(id, storages))
