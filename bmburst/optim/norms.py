"""Norms of the gradient by kind of parameter: `GradientNorms`."""

import torch
from torch import Tensor

from bmburst.blocks.kinds import KINDS, kind_of
from bmburst.comm.host_memory import HostShard, host_shard
from bmburst.zero import NamedShard, named_shards
from bmburst_ops.square_sums import square_sums


class GradientNorms:
    """Sums of squares of this rank's gradient, by kind of parameter (`bmburst.blocks.kinds`).

    Each element of the gradient is on one rank of the first ZeRO group, in every ZeRO stage and with tensor
    parallelism; the other groups have copies, which do not count. So the sums of all ranks add up to the squares of the
    norms.

    Args:
        model: A model of BMTrain modules.

    Attributes:
        kinds: The kinds that have trained parameters, in the order of `KINDS`; the same on all ranks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        shards = [each for each in named_shards(model) if each.storage.requires_grad]
        kind_by_name = {each.name: kind_of(each.name, each.shape) for each in shards}
        self.kinds = tuple(kind for kind in KINDS if kind in kind_by_name.values())
        counted = [each for each in shards if each.count and not each.is_copy]
        self._shards = [each for each in counted if host_shard(each.storage) is None]
        hosted: dict[int, tuple[HostShard, list[NamedShard]]] = {}
        for each in counted:
            if kept := host_shard(each.storage):
                hosted.setdefault(id(kept), (kept, []))[1].append(each)
        for kept, pieces in hosted.values():
            kept.pieces = tuple(slice(each.offset, each.offset + each.count) for each in pieces)
        self._hosted = [kept for kept, _ in hosted.values()]
        ordered = [*self._shards, *(each for _, pieces in hosted.values() for each in pieces)]
        rows = [kind_by_name[each.name] for each in ordered]
        self._belongs = torch.tensor([[float(kind == row) for row in rows] for kind in self.kinds], dtype=torch.float64)

    @torch.no_grad()
    def square_sums(self, device: torch.device) -> Tensor:
        """Return the sums of squares, fp64 `[kinds]` on a device. Sums of a tensor are fp32 or wider.

        Call it after backward; those of gradients in host memory were added on the device.
        """
        if not self._belongs.numel():
            return torch.zeros(len(self.kinds), dtype=torch.float64, device=device)
        gradients = [shard.storage.grad for shard in self._shards]
        has = [gradient is not None for gradient in gradients] + [True] * (self._belongs.shape[1] - len(gradients))
        pairs = zip(self._shards, gradients, strict=True)
        given = [shard.local(gradient) for shard, gradient in pairs if gradient is not None]
        squares = [square_sums(given)] if given else []
        squares += [kept.squares_on(torch.cuda.current_stream()) for kept in self._hosted]
        self._belongs = self._belongs.to(device)
        belongs = self._belongs if all(has) else self._belongs[:, has]
        # A product, because an addition by index has no fixed order on a GPU.
        return belongs @ torch.cat(squares) if squares else belongs.sum(1)
